"""Open a span for each call, and note what is sent and what comes back."""

from starlette.responses import Response

from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway.request import SERVED, Answer, Next, Request
from empo2.recipe.gateway.services import Services


async def traced(services: Services, request: Request, forward: Next) -> Response:
    """Stand before all stages that a call passes: whatever becomes of it is in its span."""
    if not (request.is_call and request.api in names.OPERATIONS):
        return await forward(request)
    with services.traces.call(request) as span:
        answer = await forward(request)
        if answer.status_code >= 400:
            span.fail(str(answer.status_code))
    return answer


async def as_sent(services: Services, request: Request, forward: Next) -> Response:
    """Stand before the last stage: note the request as it is sent, and the model's own answer."""
    span, model = services.traces.current(), services.settings.model
    forced = model.temperature if request.mode == "train" else model.val_temperature
    asked = request.body.get("temperature") if request.rollout_id == SERVED else None
    span.asked({**request.body, "temperature": forced if asked is None else asked})
    answer = await forward(request)
    span.set({names.TRAINED: request.mode == "train"})
    span.set({names.POLICY_VERSION: services.servers.version(request.rollout_id)})
    span.answered(answer.value if isinstance(answer, Answer) else None)
    return answer
