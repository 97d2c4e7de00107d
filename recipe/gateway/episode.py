"""The gateway's record of a tagged rollout, kept from its first call until the trainer has read it."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.injection import ChatTips, PromptTips
from empo2.recipe.messages import Message
from empo2.recipe.protocol import RolloutTag


@dataclass
class Turn:
    """A model call that was answered.

    Attributes:
        state: text by which the episode's tip can be found; empty if the request has no text.
        chat: the messages as sent, tips included.
        reply: the model's message.
        shared: fields of the request that a reflection repeats, so that its prompt continues this one.
        embedding: of the state, [dimension]; None until it is known.
    """

    state: str
    chat: list[Message]
    reply: Message
    shared: dict[str, Any]
    embedding: np.ndarray | None = None


@dataclass
class Episode:
    """One tagged rollout.

    Attributes:
        turns: its answered calls, in the order of their answers.
        pending: answered calls whose events are not yet recorded.
        recording: lock held while a call is recorded, so that visits and events keep the order of the answers.
        searches: calls that tips were looked up for.
        hits: those of them that were sent with tips.
        shown: ids of the tips shown, each with the number of turns it was put into.
        tip_tokens: the largest number of tip tokens in one of its prompts.
        context_full: True if its last call was refused as too long for the model's context.
        ended: True once its end has been seen.
    """

    rollout_id: str
    tag: RolloutTag
    chat_tips: ChatTips = field(default_factory=ChatTips)
    prompt_tips: PromptTips = field(default_factory=PromptTips)
    turns: list[Turn] = field(default_factory=list)
    pending: set[asyncio.Task[None]] = field(default_factory=set)
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    searches: int = 0
    hits: int = 0
    shown: Counter[int] = field(default_factory=Counter)
    tip_tokens: int = 0
    context_full: bool = False
    ended: bool = False

    async def settle(self) -> None:
        """Wait until all answered calls have their events."""
        if self.pending:
            await asyncio.wait(set(self.pending))


class Episodes:
    """The episodes that the trainer has not read yet."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}

    def __len__(self) -> int:
        return len(self._episodes)

    def of(self, rollout_id: str) -> Episode | None:
        """Return the episode of a tagged rollout; None for any other rollout."""
        tag = RolloutTag.read(upstream.metadata_of(rollout_id))
        if tag is None:
            return None
        if rollout_id not in self._episodes:
            self._episodes[rollout_id] = Episode(rollout_id, tag)
        return self._episodes[rollout_id]

    async def settle(self, rollout_id: str) -> None:
        """Wait until all answered calls of a rollout have their events."""
        if episode := self._episodes.get(rollout_id):
            await episode.settle()

    async def settle_all(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until all answered calls have their events."""
        if pending := [task for episode in self._episodes.values() for task in episode.pending]:
            await asyncio.wait(pending, timeout=timeout)

    def forget(self, rollout_id: str) -> None:
        """Drop a rollout that the trainer has read."""
        self._episodes.pop(rollout_id, None)
