"""The gateway's records of tagged rollouts, kept from their first call until the trainer has read them."""

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.request import Body
from empo2.recipe.gateway.tips.injection import EpisodeTips
from empo2.recipe.gateway.tokens.replies import Replies
from empo2.recipe.messages import Message
from empo2.recipe.protocol import RolloutTag


@dataclass
class Turn:
    """A model call that was answered."""

    state: str  # text by which the episode's tip can be found; empty if the request has no text
    chat: list[Message]  # the messages as sent, tips included
    reply: Message  # the model's message
    shared: Body  # fields of the request that a reflection repeats, so that its prompt continues this one
    embedding: np.ndarray | None = None  # of the state, [dimension]; None until it is known
    tokens: int = 0  # of the prompt; 0 if the model server does not tell


@dataclass(eq=False)
class Asked:
    """A request of an agent, however often it is sent: its state is visited once."""

    content: Any  # its messages, or its prompt, as the agent wrote them
    visits: int | None = None  # n, once its visit is counted
    # Visits by the same request, sent right after its answer. They are taken back if the next one goes on from it: the
    # agent did not return to the state, its chat shows that it acted once.
    again: int = 0

    def goes_on(self, before: "Asked") -> bool:
        """Return whether this chat is that of a request before it, its reply, and more."""
        new, old = self.content, before.content
        if isinstance(new, list) and isinstance(old, list):
            return new[: len(old)] == old and any(message.get("role") == "assistant" for message in new[len(old) :])
        return isinstance(new, str) and isinstance(old, str) and len(new) > len(old) and new.startswith(old)


@dataclass
class Episode:
    """One attempt at a tagged rollout."""

    rollout_id: str
    attempt_id: str
    tag: RolloutTag
    replies: Replies = field(default_factory=Replies)  # as they were sampled
    tips: EpisodeTips = field(default_factory=EpisodeTips)
    turns: list[Turn] = field(default_factory=list)  # its answered calls, in the order of their answers
    pending: set[asyncio.Task[None]] = field(default_factory=set)  # answered calls whose events are not yet recorded
    under_way: list[Asked] = field(default_factory=list)  # the request of each call that is not answered yet
    asked: Asked | None = None  # the last one whose visit was counted
    # Lock held while a call is recorded, so that visits and events keep the order of the answers.
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    searches: int = 0  # calls that tips were looked up for
    hits: int = 0  # those of them that were sent with tips
    # Ids of the tips shown, each with the number of turns it was put into.
    shown: Counter[int] = field(default_factory=Counter)
    tip_tokens: int = 0  # the largest number of tip tokens in one of its prompts
    context_full: bool = False  # True if its last call was refused as too long for the model's context
    with_tools: bool = False  # True if one of its calls has offered tools

    def ask(self, body: Body) -> Asked:
        """Note a call until it is taken from `under_way`: one that comes before an equal one is answered repeats it."""
        content = body.get("messages", body.get("prompt"))
        asked = next((asked for asked in self.under_way if asked.content == content), Asked(content))
        self.under_way.append(asked)
        return asked


class Episodes:
    """The episodes that the trainer has not read yet."""

    def __init__(self) -> None:
        self._rollouts: dict[str, dict[str, Episode]] = {}  # by rollout and attempt
        self._concluded: set[str] = set()
        self.replies = upstream.PerRollout(lambda: defaultdict[str, Replies](Replies))  # of attempts without a tag

    def __len__(self) -> int:
        """Return the number of rollouts."""
        return len(self._rollouts)

    def of(self, rollout_id: str, attempt_id: str) -> Episode | None:
        """Return the episode of an attempt at a tagged rollout; None for any other rollout."""
        if found := self._rollouts.get(rollout_id, {}).get(attempt_id):
            return found
        if (tag := upstream.tag_of(rollout_id)) is None:
            return None
        return self._rollouts.setdefault(rollout_id, {}).setdefault(attempt_id, Episode(rollout_id, attempt_id, tag))

    def conclude(self, rollout_id: str) -> Episode | None:
        """Return, once for a tagged rollout that has ended, the episode of the attempt that counts."""
        if rollout_id in self._concluded:
            return None
        episode = self.of(rollout_id, upstream.attempt_of(rollout_id))
        if episode is not None:
            self._concluded.add(rollout_id)
        return episode

    def pending(self, rollout_id: str | None = None) -> set[asyncio.Task[None]]:
        """Return the answered calls, of a rollout or of all, whose events are not yet recorded."""
        chosen = self._rollouts.values() if rollout_id is None else [self._rollouts.get(rollout_id, {})]
        return {task for attempts in chosen for episode in attempts.values() for task in episode.pending}

    async def settle(self, rollout_id: str | None, timeout: float) -> int:
        """Wait at most ``timeout`` seconds for the events of the calls in `pending`; return how many have none then."""
        if not (pending := self.pending(rollout_id)):
            return 0
        _, late = await asyncio.wait(pending, timeout=timeout)
        return len(late)

    def forget(self, rollout_id: str) -> None:
        """Drop a rollout that the trainer has read."""
        self._rollouts.pop(rollout_id, None)
        self._concluded.discard(rollout_id)

    def drop_unchanged(self, seconds: float) -> int:
        """Drop every rollout, tagged or not, in which nothing has happened for so long; return their number.

        A trainer that was killed never deletes its rollouts, and agent-lightning would hold their events for ever.
        """
        old = list(upstream.unchanged_since(time.time() - seconds))
        for rollout_id in old:
            upstream.delete(rollout_id)
            self.forget(rollout_id)
        return len(old)
