"""Open a span for each call, and note what is sent and what comes back."""

from starlette.responses import Response

from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway.request import SERVED, Answer, Next, Request
from empo2.recipe.gateway.services import Services


class Traced:
    """Stand before all stages that a call passes: whatever becomes of it is in its span."""

    def __init__(self, services: Services) -> None:
        self._traces = services.traces

    async def __call__(self, request: Request, forward: Next) -> Response:
        if not (request.is_call and request.api in names.OPERATIONS):
            return await forward(request)
        with self._traces.call(request) as span:
            answer = await forward(request)
            if answer.status_code >= 400:
                span.fail(str(answer.status_code))
        return answer


class AsSent:
    """Stand before the last stage: note the request as it is sent, and the model's own answer."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, request: Request, forward: Next) -> Response:
        if not request.is_completion:
            return await forward(request)
        span, model = self._services.traces.current(), self._services.settings.model
        forced = model.temperature if request.mode == "train" else model.val_temperature
        asked = request.body.get("temperature") if request.rollout_id == SERVED else None
        span.asked({**request.body, "temperature": forced if asked is None else asked})
        answer = await forward(request)
        span.set({names.TRAINED: request.mode == "train"})
        span.set({names.POLICY_VERSION: self._services.servers.version(request.rollout_id)})
        span.answered(answer.value if isinstance(answer, Answer) else None)
        return answer
