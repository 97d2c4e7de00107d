"""Answer calls that leave no trace in a rollout: untrained ones, and those that only count a prompt's tokens."""

import httpx
from starlette.responses import JSONResponse, Response

from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.request import Answer, Next, Request, refusal
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.limits import checked
from empo2.recipe.gateway.tokens.rendering import rendered

_SECONDS = 300  # as the agents' own calls


class Aside:
    """Stand behind the limits and the normal form, which these calls have as all others do."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, request: Request, forward: Next) -> Response:
        match request.aside:
            case "untrained":
                return await untrained(self._services, request)
            case "count":
                return await self._counted(request)
            case _:
                return await forward(request)

    async def _counted(self, request: Request) -> Response:
        """Return how long the policy's prompt would be, without tips."""
        if upstream.rollout_of(request.rollout_id) is None:
            return refusal(404, f"Rollout not found: {request.rollout_id}")
        try:
            prompt = await rendered(self._services.servers, request.rollout_id, request.body)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 400:
                return Response(error.response.content, 400)
            return refusal(502, f"the model server answers {error.response.status_code} to /tokenize")
        except (upstream.NoServersError, httpx.HTTPError) as error:
            return _unanswered(error)
        return JSONResponse({"input_tokens": len(prompt)})


async def untrained(services: Services, request: Request) -> Response:
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
