"""Answer with the events of a rollout, which the gateway holds in a shorter form than agent-lightning's."""

from urllib.parse import parse_qsl

from starlette.responses import Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.request import Answer, Next, Request
from empo2.recipe.json_text import dumped


class Events:
    """Stand in the place of agent-lightning's route; an unknown rollout is its to refuse."""

    async def __call__(self, request: Request, forward: Next) -> Response:
        if (request.method, request.kind) != ("GET", "events"):
            return await forward(request)
        asked = dict(parse_qsl(request.scope["query_string"].decode("latin-1")))
        events = upstream.events_as_asked(request.rollout_id, asked)
        return await forward(request) if events is None else Answer(dumped(events))
