"""The chats of agents that have no rollout: each is an episode, so that tips are shown as in validation."""

from functools import lru_cache
from itertools import takewhile

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.episodes.episode import Episode
from empo2.recipe.gateway.request import SERVED, Body
from empo2.recipe.messages import digest
from empo2.recipe.protocol import RolloutTag

_MOST_CHATS = 10_000


class DirectChats:
    """The episodes of chats, told apart by how they open; the one that was used longest ago is dropped.

    Two chats that open with the same messages share an episode, and with it the tips of the turns that are the same.
    """

    def __init__(self, tag: RolloutTag) -> None:
        self._of = lru_cache(_MOST_CHATS)(lambda opening: Episode(SERVED, upstream.DEFAULT_ATTEMPT_ID, tag))

    def episode(self, body: Body) -> Episode:
        """Return the episode of a request: a chat completion, or a completion, which is a chat of its own."""
        opening = body.get("prompt")
        if isinstance(messages := body.get("messages"), list):  # those before the first reply
            opening = [*takewhile(lambda message: message.get("role") != "assistant", messages)]
        return self._of(digest(opening))
