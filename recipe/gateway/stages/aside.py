"""Answer calls that leave no trace in a rollout.

They are untrained ones, those beside the main chat, and those that only count a prompt's tokens.
"""

import httpx
from starlette.responses import JSONResponse, Response

from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.request import Answer, Next, Request, refusal, unless_hung_up
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.limits import checked
from empo2.recipe.gateway.tokens.rendering import rendered
from empo2.recipe.messages import is_beside, is_compaction

_SECONDS = 300  # as the agents' own calls


async def aside(services: Services, request: Request, forward: Next) -> Response:
    """Answer what an earlier stage has set aside; stands behind the limits and the normal form, as for all calls."""
    match request.aside:
        case "untrained":
            return await unless_hung_up(request, _untrained(services, request))
        case "count":
            return await _counted(services, request)
        case _:
            return await forward(request)


class SideCalls:
    """Answer calls beside the main chat, such as for a title: of an agent that offers tools, one turn without any.

    So are calls that compact the chat, if ``gateway.compaction`` says so. Before a rollout's first call with tools
    nothing tells a side call: it passes, and the trainer leaves it out (`rollout_calls.main_calls`).
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._with_tools = upstream.PerRollout(bool)

    async def __call__(self, request: Request, forward: Next) -> Response:
        self._with_tools[request.rollout_id] |= bool(request.body.get("tools"))
        with_tools, counts = self._with_tools[request.rollout_id], self._services.metrics.counts
        if is_compaction(request.body, with_tools=with_tools):
            counts["compaction_calls"] += 1
            if self._services.settings.gateway.compaction == "trained":
                return await forward(request)
        elif with_tools and is_beside(request.body):
            counts["side_calls"] += 1
        else:
            return await forward(request)
        return await unless_hung_up(request, _untrained(self._services, request))


async def _counted(services: Services, request: Request) -> Response:
    """Return how long the policy's prompt would be, without tips."""
    try:
        prompt = await rendered(services.servers, request.rollout_id, request.body)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == 400:
            return Response(error.response.content, 400)
        return refusal(502, f"the model server answers {error.response.status_code} to /tokenize")
    except (upstream.NoServersError, httpx.HTTPError) as error:
        return _unanswered(error)
    return JSONResponse({"input_tokens": len(prompt)})


async def _untrained(services: Services, request: Request) -> Response:
    """Return the policy's answer to a completion, whole."""
    body, span = checked(request).body, services.traces.current()
    span.asked(body)
    span.set({names.TRAINED: False})
    try:
        async with services.gate:
            answer = await services.servers.post(request.rollout_id, f"/{request.api}", body, timeout=_SECONDS)
    except (upstream.NoServersError, httpx.HTTPError) as error:
        return _unanswered(error)
    return Answer(answer.content, answer.status_code)


def _unanswered(error: upstream.NoServersError | httpx.HTTPError) -> Response:
    if isinstance(error, upstream.NoServersError):
        return refusal(503, str(error))
    return refusal(502, f"the model server does not answer: {type(error).__name__}")
