"""Answer calls beside the main chat, such as for a title or a commit message; they leave no trace in a rollout."""

import httpx
from starlette.responses import Response

from empo2.recipe.gateway.request import Answer, Next, Request, refusal
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.upstream import NoServersError
from empo2.recipe.messages import is_beside

_SECONDS = 300  # as the agents' own calls


class SideCalls:
    """Leave out of training what an agent that offers tools asks without any, in a chat of one turn.

    Until its first call with tools nothing tells them, so the trainer leaves out those of the run's first rollouts.
    Rules of ``gateway.trained_calls`` take the place of this one.
    """

    def __init__(self, services: Services, *, chosen: bool) -> None:
        self._services = services
        self._chosen = chosen  # by the user's rules
        self._tools_offered = False

    async def __call__(self, request: Request, forward: Next) -> Response:
        if self._chosen or not request.is_completion:
            return await forward(request)
        self._tools_offered |= bool(request.body.get("tools"))
        if not (self._tools_offered and is_beside(request.body)):
            return await forward(request)
        self._services.metrics.counts["side_calls"] += 1
        try:
            async with self._services.gate:
                answer = await self._services.servers.post(
                    request.rollout_id, f"/{request.api}", request.body, timeout=_SECONDS
                )
        except NoServersError as error:
            return refusal(503, str(error), call=True)
        except httpx.HTTPError as error:
            return refusal(502, f"the model server does not answer: {type(error).__name__}", call=True)
        return Answer(answer.content, answer.status_code)
