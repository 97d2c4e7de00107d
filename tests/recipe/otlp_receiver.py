"""A collector of OpenTelemetry's spans, as the OTLP specification has it over HTTP."""

import asyncio
import gzip
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from .model_server import serving

SECONDS = 60


# A span as it came; ids in hexadecimal, times in nanoseconds; events by name, the ids of linked spans.
SeenSpan = SimpleNamespace


@dataclass
class OtlpReceiver:
    """Attributes: `fault`, a status to answer with, "hang" for none before the end; `key`, of the last request."""

    fault: int | Literal["hang"] | None = None
    spans: list[SeenSpan] = field(default_factory=list)
    url: str = ""
    key: str | None = None

    def of(self, trace: str, count: int) -> list[SeenSpan]:
        """The spans of a trace in the order of their starts, when there are so many."""
        end = time.monotonic() + SECONDS
        while len(found := [span for span in self.spans if span.trace == trace]) < count and time.monotonic() < end:
            time.sleep(0.02)
        assert len(found) == count, [span.name for span in found]
        return sorted(found, key=lambda span: span.start)

    @contextmanager
    def serve(self) -> Iterator["OtlpReceiver"]:
        app = FastAPI()

        @app.post("/v1/traces")
        async def take(request: Request) -> Response:
            content, self.key = await request.body(), request.headers.get("authorization")
            if self.fault == "hang":
                await asyncio.sleep(SECONDS)
            elif self.fault is None:
                assert request.headers["content-type"] == "application/x-protobuf"
                packed = "content-encoding" in request.headers
                self.spans += _spans(gzip.decompress(content) if packed else content)
            return Response(status_code=self.fault if isinstance(self.fault, int) else 200)

        with serving(app) as self.url:
            yield self


def _spans(content: bytes) -> Iterator[SeenSpan]:
    request = ExportTraceServiceRequest.FromString(content)
    for resource in request.resource_spans:
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield SeenSpan(
                name=span.name,
                trace=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                kind=span.kind,
                start=span.start_time_unix_nano,
                end=span.end_time_unix_nano,
                failed=span.status.code == 2,
                message=span.status.message,
                attributes=_attributes(span.attributes),
                events={event.name: _attributes(event.attributes) for event in span.events},
                links=[link.span_id.hex() for link in span.links],
                resource=_attributes(resource.resource.attributes),
            )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
