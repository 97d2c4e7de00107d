"""Notice when a rollout ends, and when the trainer has read it."""

from starlette.responses import Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.request import Next, Request
from empo2.recipe.gateway.services import Services


class RolloutEnds:
    """Start the reflection on a rollout that has ended; forget one that was deleted."""

    def __init__(self, services: Services, episodes: Episodes, reflector: Reflector) -> None:
        self._traces = services.traces
        self._episodes = episodes
        self._reflector = reflector

    async def __call__(self, request: Request, forward: Next) -> Response:
        if request.kind != "rollout":
            return await forward(request)
        rollout_id, before = request.rollout_id, upstream.rollout_of(request.rollout_id)
        since = before.status.updated_at if before and not upstream.is_over(before) else None
        if since is not None and request.method == "DELETE":
            self._traces.rollout_ended(rollout_id, since)
        answer = await forward(request)
        rollout = upstream.rollout_of(rollout_id)
        if request.method == "DELETE" and rollout is None:
            self._episodes.forget(rollout_id)
        elif request.method == "PATCH" and answer.status_code == 200 and rollout and upstream.is_over(rollout):
            # Before the answer leaves: the trainer may read and delete the rollout a moment later.
            episode = self._episodes.conclude(rollout_id)
            if since is not None:
                self._traces.rollout_ended(rollout_id, since, episode and episode.shown.keys())
            if episode is not None:
                succeeded = rollout.status.state == upstream.RolloutState.SUCCEEDED
                self._reflector.finished(episode, succeeded=succeeded, rewards=upstream.rewards_of(rollout_id))
        return answer
