"""Answer with the events of a rollout; notice when one ends, and when the trainer has read it."""

from urllib.parse import parse_qsl

from starlette.responses import Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.request import Answer, Next, Request
from empo2.recipe.gateway.services import Services
from empo2.recipe.json_text import dumped


async def events(request: Request, forward: Next) -> Response:
    """Stand in the place of agent-lightning's route, whose events are held in a shorter form here.

    An unknown rollout is its to refuse.
    """
    if (request.method, request.kind) != ("GET", "events"):
        return await forward(request)
    asked = dict(parse_qsl(request.scope["query_string"].decode("latin-1")))
    found = upstream.events_as_asked(request.rollout_id, asked)
    return await forward(request) if found is None else Answer(dumped(found))


async def rollout_ends(
    services: Services, episodes: Episodes, reflector: Reflector, request: Request, forward: Next
) -> Response:
    """Start the reflection on a rollout that has ended; forget one that was deleted."""
    if request.kind != "rollout":
        return await forward(request)
    rollout_id, before = request.rollout_id, upstream.rollout_of(request.rollout_id)
    since = before.status.updated_at if before and not upstream.is_over(before) else None
    if since is not None and request.method == "DELETE":
        services.traces.rollout_ended(rollout_id, since)
    answer = await forward(request)
    rollout = upstream.rollout_of(rollout_id)
    if request.method == "DELETE" and rollout is None:
        episodes.forget(rollout_id)
    elif request.method == "PATCH" and answer.status_code == 200 and rollout and upstream.is_over(rollout):
        # Before the answer leaves: the trainer may read and delete the rollout a moment later.
        episode = episodes.conclude(rollout_id)
        if since is not None:
            services.traces.rollout_ended(rollout_id, since, episode and episode.shown.keys())
        if episode is not None:
            succeeded = rollout.status.state == upstream.RolloutState.SUCCEEDED
            reflector.finished(episode, succeeded=succeeded, rewards=upstream.rewards_of(rollout_id))
    return answer
