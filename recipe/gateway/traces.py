"""Spans of what the gateway does. Those here record nothing; with ``gateway.traces``, those of otel_traces.py do."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from empo2.recipe.gateway.episodes.episode import Episode
from empo2.recipe.gateway.request import Body, Request
from empo2.recipe.protocol import UpdateResult


class Span:
    """A span that records nothing."""

    def set(self, values: Mapping[str, Any]) -> None:
        """Add attributes; those that are None are left out."""

    def tell(self, values: Mapping[str, str | Sequence[str]]) -> None:
        """Add texts, if the user has asked for texts."""

    def asked(self, body: Body) -> None:
        """Add what a request asks for: a chat completion's, a completion's, or one in another dialect."""

    def answered(self, answer: Body | None) -> None:
        """Add what is said of the answer: a chat completion or a completion."""

    def fail(self, error: str, message: str = "") -> None:
        """Say that what the span stands for failed.

        Args:
            error: of few values, such as a status or the class of an exception.
        """

    def wait_for(self, task: asyncio.Task[Any]) -> None:
        """Send the span only when a task is done, which may still add to it; its end stays where it was."""


NO_SPAN = Span()


class Traces:
    """Makes spans that record nothing.

    Attributes:
        hooks: of HTTP clients (httpx's ``event_hooks``) whose requests are to be children of the current span.
    """

    def __init__(self) -> None:
        self.hooks: Mapping[str, Any] = {}

    def current(self) -> Span:
        """Return the innermost span that is open here."""
        return NO_SPAN

    def call(self, request: Request) -> AbstractContextManager[Span]:
        """Open the span of a call."""
        return nullcontext(NO_SPAN)

    def memory(self, operation: str, episode: Episode) -> AbstractContextManager[Span]:
        """Open the span of an operation of the memory: below the current call, or below the rollout."""
        return nullcontext(NO_SPAN)

    def rollout_ended(self, rollout_id: str, since: float, episode: Episode | None = None) -> None:
        """Send the span of a rollout that has ended, or is about to be deleted.

        Args:
            since: when it began (Unix time, seconds).
            episode: of the attempt that counts; None if it has no tag.
        """

    def updated(self, step: int, results: Sequence[UpdateResult]) -> None:
        """Send what an update made of rollouts, as spans in their traces."""

    def metrics(self) -> dict[str, float]:
        """Return ``empo2/spans_lost`` since the last call; nothing if traces are off."""
        return {}

    async def close(self, seconds: float) -> None:
        """Send what is left, for at most so many seconds."""
