"""Spans of what the gateway does: OpenTelemetry's (otel_traces.py) with ``gateway.traces``, else none."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from empo2.recipe.gateway.otel_traces import OtelSpan, OtelTraces


class NoTraces:
    """Stands for `OtelTraces`, and for each span of it, where nothing is recorded."""

    hooks: ClassVar[Mapping[str, Any]] = {}

    def current(self, *_: Any) -> Self:
        return self

    call = memory = __enter__ = current

    def set(self, *_: Any) -> None:
        pass

    tell = asked = answered = fail = wait_for = rollout_ended = updated = __exit__ = set

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self, seconds: float) -> None:
        pass


NO_TRACES = NoTraces()

type Traces = OtelTraces | NoTraces
type Span = OtelSpan | NoTraces
