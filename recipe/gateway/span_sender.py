"""Spans on their way to a collector: OpenTelemetry's SDK, which sends them in the background (OTLP over HTTP)."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace import Span

from empo2.recipe.gateway import trace_names as names
from empo2.recipe.printed import one_line
from empo2.recipe.redaction import redacted

log = structlog.get_logger()

_QUEUE_SPANS = 2048  # that wait for the collector; more are lost
_BATCH_SPANS = 64  # of a request
_NAME = "empo2"


class SpanSender(BatchSpanProcessor, logging.Handler):
    """Starts spans, sends those that have ended, counts those that are lost, and says once why.

    It is the handler of OpenTelemetry's own log, which would say it every few seconds.

    Args:
        endpoint: URL that takes OTLP, ``.../v1/traces``.
        run: name of the run, in every span's resource.
    """

    def __init__(self, endpoint: str, run: str) -> None:
        logging.Handler.__init__(self, logging.ERROR)
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self], False
        self._endpoint, self._ids = redacted(endpoint), _Ids()
        self._why, self._said = "", False
        self._queued = self._taken = self._refused = self._failed = self._told = 0  # each is changed by one thread
        exporter = _Exporter(endpoint, self._exported)
        BatchSpanProcessor.__init__(self, exporter, max_queue_size=_QUEUE_SPANS, max_export_batch_size=_BATCH_SPANS)
        service = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: _NAME}
        resource = Resource.create({**service, names.RUN: run})
        # All traces, but those that an agent does not sample. A ratio would compare the lower half of the trace's id,
        # and in each UUID that begins with the same two bits.
        provider = TracerProvider(DEFAULT_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self)
        self._tracer = provider.get_tracer(_NAME)

    def start(self, planned: tuple[int, int] | None, *args: Any) -> Span:
        """Start a span, as `Tracer.start_span` does.

        Args:
            planned: the ids of the trace, if there is no parent, and of the span; None for random ones.
        """
        self._ids.planned = planned
        return self._tracer.start_span(*args)

    def on_end(self, span: ReadableSpan) -> None:
        if self._queued - self._taken < _QUEUE_SPANS:
            self._queued += 1
            super().on_end(span)
        else:
            self._refused += 1
            self._say(f"{_QUEUE_SPANS} wait for it")

    def emit(self, record: logging.LogRecord) -> None:
        self._why = one_line(record.getMessage())

    def newly_lost(self) -> int:
        """Return how many spans were lost since the last call."""
        before, self._told = self._told, self._refused + self._failed
        return self._told - before

    async def send_rest(self, seconds: float) -> None:
        """Send what still waits, for at most so many seconds."""
        thread = threading.Thread(target=self.shutdown, daemon=True)  # it waits for the collector
        thread.start()
        await asyncio.to_thread(thread.join, seconds)
        if waiting := self._queued - self._taken:
            log.warning(f"{waiting} spans lost: the collector did not take them before the gateway ended")

    def _exported(self, spans: int, *, taken: bool) -> None:
        self._taken += spans
        if taken:
            self._said = False
        else:
            self._failed += spans
            self._say(self._why)

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            log.warning(f"spans are lost: the collector at {self._endpoint} does not take them: {why}")


class _Exporter(OTLPSpanExporter):
    """Tells what became of each batch."""

    def __init__(self, endpoint: str, exported: Callable[..., None]) -> None:
        super().__init__(endpoint)
        self._exported = exported

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self._exported(len(spans), taken=result is SpanExportResult.SUCCESS)
        return result


class _Ids(RandomIdGenerator):
    """Gives random ids, or those that are planned."""

    planned: tuple[int, int] | None = None  # of a trace and a span

    def generate_trace_id(self) -> int:
        return self.planned[0] if self.planned else super().generate_trace_id()

    def generate_span_id(self) -> int:
        return self.planned[1] if self.planned else super().generate_span_id()
