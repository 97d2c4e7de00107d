"""Calls of agents that have no rollout, as of any OpenAI-compatible server: ``/v1/...`` (``empo2 serve``).

They all belong to one rollout, which stays open and keeps no events, since nobody trains on them.
"""

from functools import lru_cache

from starlette.responses import Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.episodes.episode import Episode
from empo2.recipe.gateway.request import SERVED, Body, Next, Request
from empo2.recipe.messages import opening_of
from empo2.recipe.protocol import RolloutTag

_PATH = "/v1/"
_MOST_CHATS = 10_000


async def direct_calls(request: Request, forward: Next) -> Response:
    """Turn ``/v1/...`` into a call of the one rollout."""
    if not request.path.startswith(_PATH):
        return await forward(request)
    await upstream.keep_open(SERVED)
    try:
        path = request.path.removeprefix(_PATH)
        return await forward(request.as_call(SERVED, upstream.DEFAULT_ATTEMPT_ID, "val", path))
    finally:
        upstream.forget_events(SERVED)


class DirectChats:
    """The chats of agents that have no rollout: each is an episode, so that tips are shown as in validation.

    They are told apart by how they open; the one that was used longest ago is dropped. Two chats that open with the
    same messages share an episode, and with it the tips of the turns that are the same.
    """

    def __init__(self, tag: RolloutTag) -> None:
        self._of = lru_cache(_MOST_CHATS)(lambda opening: Episode(SERVED, upstream.DEFAULT_ATTEMPT_ID, tag))

    def episode(self, body: Body) -> Episode:
        """Return the episode of a request: a chat completion, or a completion, which is a chat of its own."""
        return self._of(opening_of(body))
