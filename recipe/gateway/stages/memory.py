"""Show tips in the calls of tagged rollouts, and record each call beside agent-lightning's own event.

Other traffic passes unchanged, but for options that could end the model server. The one exception are the training
calls of plain GRPO, whose rollouts have no tag: they are sampled like those of EMPO², so that the two can be compared.
"""

from starlette.responses import Response

from empo2.recipe.gateway.episodes.call import ModelCall, PlainCall, prepare_call, prepare_plain_call
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.request import SERVED, Answer, Body, Next, Request
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.direct_calls import DirectChats
from empo2.recipe.gateway.stages.limits import checked


async def memory_calls(
    services: Services, episodes: Episodes, chats: DirectChats | None, request: Request, forward: Next
) -> Response:
    """Replace the agent's request by one with tips, and record what came of it.

    Args:
        chats: of agents that have no rollout; None if they are shown no tips.
    """
    services.metrics.counts["requests"] += 1
    call = await _call_of(services, episodes, chats, request)
    if call is None:
        return await forward(checked(request))
    try:
        answer = await forward(request.with_body(call.sent))
        while answer.status_code == 400 and (shorter := await call.shorter(_value(answer))) is not None:
            answer = await forward(request.with_body(shorter))
    except BaseException:
        call.refused(0, None)
        raise
    response = _value(answer)
    if answer.status_code == 200 and response is not None:
        # Before the answer leaves: the agent may report its reward and be gone a moment later.
        assert isinstance(answer, Answer)
        call.answered(response, answer.call, answer.prompt)
        if call.teaches:
            answer = Answer.of(response)
    else:
        call.refused(answer.status_code, response)
    return answer


async def _call_of(
    services: Services, episodes: Episodes, chats: DirectChats | None, request: Request
) -> ModelCall | PlainCall | None:
    body, training = request.body, request.mode == "train"
    if chats is not None and request.rollout_id == SERVED:
        return await prepare_call(services, chats.episode(body), body)
    episode = episodes.of(request.rollout_id, request.attempt_id)
    if episode is not None and (training or episode.tag.read_only):
        return await prepare_call(services, episode, body)
    if episode is None and training and services.settings.algorithm.name == "grpo":
        replies = episodes.replies[request.rollout_id][request.attempt_id]
        return await prepare_plain_call(services, request.rollout_id, replies, body)
    return None


def _value(answer: Response) -> Body | None:
    return answer.value if isinstance(answer, Answer) else None
