"""Notice when a rollout ends, and when the trainer has read it."""

from starlette.responses import Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.request import Next, Request


class RolloutEnds:
    """Start the reflection on a rollout that has ended; forget one that was deleted."""

    def __init__(self, episodes: Episodes, reflector: Reflector) -> None:
        self._episodes = episodes
        self._reflector = reflector

    async def __call__(self, request: Request, forward: Next) -> Response:
        answer = await forward(request)
        if request.kind == "rollout":
            rollout_id = request.rollout_id
            if request.method == "PATCH" and answer.status_code == 200 and upstream.has_ended(rollout_id):
                # Before the answer leaves: the trainer may read and delete the rollout a moment later.
                episode = self._episodes.conclude(rollout_id)
                if episode is not None:
                    rewards = upstream.rewards_of(rollout_id)
                    self._reflector.finished(episode, succeeded=upstream.has_succeeded(rollout_id), rewards=rewards)
            elif request.method == "DELETE" and not upstream.exists(rollout_id):
                self._episodes.forget(rollout_id)
        return answer
