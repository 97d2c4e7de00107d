"""Spans of what the gateway does: OpenTelemetry's (otel_traces.py) with ``gateway.traces``, else none."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from empo2.recipe.gateway.request import Body, Request
from empo2.recipe.protocol import RolloutTag, UpdateResult


class Span:
    """What is told of one call, or of one operation of the memory; this one drops it."""

    def set(self, values: Mapping[str, Any]) -> None:
        """Add attributes; those that are None are left out."""

    def tell(self, values: Mapping[str, str | Sequence[str]]) -> None:
        """Add texts, if the user has asked for texts."""

    def asked(self, body: Body) -> None:
        """Add what a request asks for: a chat completion's, a completion's, or one in another dialect."""

    def answered(self, answer: Body | None) -> None:
        """Add what is said of the answer: a chat completion or a completion."""

    def fail(self, error: str, message: str = "") -> None:
        """Say that what the span stands for failed; ``error`` is of few values, such as a status."""

    def wait_for(self, task: asyncio.Task[Any]) -> None:
        """Send the span only when a task is done, which may still add to it; its end stays where it was."""


class Traces:
    """Makes the spans of a gateway; this one, where ``gateway.traces`` is off, makes none."""

    def headers(self) -> dict[str, str]:
        """Return the headers of a request that is to be a child of the current span."""
        return {}

    def current(self) -> Span:
        """Return the innermost span that is open here."""
        return NO_SPAN

    def call(self, request: Request) -> AbstractContextManager[Span]:
        """Open the span of an agent's call."""
        return nullcontext(NO_SPAN)

    def memory(self, operation: str, rollout_id: str, tag: RolloutTag) -> AbstractContextManager[Span]:
        """Open the span of an operation of the memory: below the current call, or below the rollout."""
        return nullcontext(NO_SPAN)

    def rollout_ended(self, rollout_id: str, since: float, shown: Collection[int] | None = None) -> None:
        """Send the span of a rollout that has ended, or is about to be deleted.

        Args:
            since: when it began (Unix time, seconds).
            shown: ids of the tips that the attempt that counts was shown; None if the rollout has no tag.
        """

    def updated(self, step: int, results: Sequence[UpdateResult]) -> None:
        """Send what an update made of rollouts, as spans in their traces."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the traces themselves since the last call."""
        return {}

    async def close(self, seconds: float) -> None:
        """Send what is left, for at most so many seconds."""


NO_SPAN, NO_TRACES = Span(), Traces()
