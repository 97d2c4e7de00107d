"""Spans by OpenTelemetry, sent to a collector in the background (OTLP over HTTP). docs/traces.md shows them.

The ids of a rollout's own span follow from the rollout's id (`protocol.trace_of`). So the controller can tell an agent
its parent before the rollout ends, which is when that span is sent, and nothing is kept of a rollout between its calls.
An agent whose client sends a trace of its own keeps it: then the rollout's spans join that trace, and its own span is a
child of the span that made the first call. Of that trace alone the ids are kept, of the latest rollouts.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import structlog
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from empo2.recipe.config import Settings
from empo2.recipe.failures import cause_of_failure, reported_error
from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.request import SERVED, Body, Request
from empo2.recipe.gateway.tips.text import clean_tip
from empo2.recipe.gateway.traces import NO_SPAN, Span, Traces
from empo2.recipe.messages import Message, reply_of, text_of
from empo2.recipe.protocol import MODEL_EVENT, Mode, RolloutTag, UpdateResult, data_of, trace_of
from empo2.recipe.redaction import redacted

log = structlog.get_logger()

_W3C = TraceContextTextMapPropagator()
_QUEUE_SPANS = 2048  # that wait for the collector; more are lost
_BATCH_SPANS = 64  # of a request
_JOINED = 10_000  # rollouts whose agents have traces of their own
_TASK_CHARACTERS = 1000
_NAME = "empo2"
# Of what an agent or a server may send in the place of a chat: such a span lacks what cannot be read.
_MALFORMED = (LookupError, TypeError, AttributeError)


class OtelSpan(Span):
    """A span of OpenTelemetry's.

    Args:
        operation: begins its name.
        texts: cleans what is told; None if nobody asks for texts.
    """

    def __init__(self, span: otel.Span, operation: str, texts: "_Texts | None") -> None:
        self.otel = span
        self._operation = operation
        self._texts = texts
        self._waits_for, self._ended = 1, 0

    def set(self, values: Mapping[str, Any]) -> None:
        self.otel.set_attributes({name: value for name, value in values.items() if value is not None})

    def tell(self, values: Mapping[str, str | Sequence[str]]) -> None:
        if texts := self._texts:
            self.set({name: texts.told(value) for name, value in values.items()})

    def asked(self, body: Body) -> None:
        if isinstance(model := body.get("model"), str):
            self.otel.update_name(f"{self._operation} {model}")
            self.set({names.REQUEST_MODEL: model})
        self.set({name: body[key] for key, name in names.REQUEST.items() if isinstance(body.get(key), int | float)})
        with contextlib.suppress(*_MALFORMED):
            if self._texts:
                messages = body.get("messages") or [{"role": "user", "content": body["prompt"]}]
                self.set({names.INPUT_MESSAGES: self._texts.messages(messages)})

    def answered(self, answer: Body | None) -> None:
        if answer is None or (reply := reply_of(answer)) is None:
            return
        finish = str(answer["choices"][0].get("finish_reason"))
        values = {names.RESPONSE_ID: answer.get("id"), names.RESPONSE_MODEL: answer.get("model")}
        self.set({**values, names.FINISH_REASONS: [finish]})
        with contextlib.suppress(*_MALFORMED):
            if self._texts:
                self.set({names.OUTPUT_MESSAGES: self._texts.messages([reply], finish_reason=finish)})
            usage = answer["usage"]
            self.set({names.INPUT_TOKENS: usage["prompt_tokens"], names.OUTPUT_TOKENS: usage["completion_tokens"]})
            self.set({names.CACHED_TOKENS: usage["prompt_tokens_details"]["cached_tokens"]})

    def fail(self, error: str, message: str = "") -> None:
        self.set({names.ERROR: error})
        self.otel.set_status(otel.Status(otel.StatusCode.ERROR, message or None))

    def wait_for(self, task: asyncio.Task[Any]) -> None:
        self._waits_for += 1
        task.add_done_callback(lambda _: self.end())

    def end(self) -> None:
        self._ended = self._ended or time.time_ns()
        self._waits_for -= 1
        if not self._waits_for:
            self.otel.end(self._ended)


class OtelTraces(Traces):
    """Makes spans of OpenTelemetry's.

    Args:
        endpoint: URL that takes OTLP, ``.../v1/traces``.
        run: name of the run, in every span's resource.
        special_tokens: removed from texts.
    """

    def __init__(self, endpoint: str, settings: Settings, run: str, special_tokens: Sequence[str]) -> None:
        self._provider_name = "openai" if settings.model.server else "vllm"
        captured = os.environ.get(names.CAPTURE, "").lower()  # "event_only" is for logs, which are not sent
        texts = _Texts(special_tokens)
        self._cleaned = texts.told
        self._texts = texts if captured in ("true", "span_only", "span_and_event") else None
        self._sender, self._ids = _Sender(endpoint), _Ids()
        self._queue = _Queue(self._sender)
        service = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: _NAME}
        resource = Resource.create({**service, names.RUN: run})
        # All traces, but those that an agent does not sample. A ratio would compare the lower half of the trace's id,
        # and in each UUID that begins with the same two bits.
        provider = TracerProvider(DEFAULT_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer(_NAME)
        self._current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)
        self._joined: OrderedDict[str, otel.SpanContext] = OrderedDict()

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if isinstance(span := self.current(), OtelSpan):
            _W3C.inject(headers, otel.set_span_in_context(span.otel, Context()))
        return headers

    def current(self) -> Span:
        return self._current.get()

    @contextlib.contextmanager
    def call(self, request: Request) -> Iterator[OtelSpan]:
        rollout_id, links = request.rollout_id, []
        parent = given = otel.get_current_span(_W3C.extract(request.headers, Context())).get_span_context()
        if rollout_id != SERVED:
            if given.is_valid and given.trace_id != trace_of(rollout_id)[0]:
                self._joined.setdefault(rollout_id, given)
                if len(self._joined) > _JOINED:
                    self._joined.popitem(last=False)
            own = self._own(rollout_id)
            parent = given if given.is_valid else own
            links = [otel.Link(own)] if parent.trace_id != own.trace_id else []
        operation = names.OPERATIONS[request.api]
        values = {names.OPERATION: operation, names.ATTEMPT: request.attempt_id, **self._facts(rollout_id)}
        with self._open(operation, parent, values, otel.SpanKind.CLIENT, links) as span:
            yield span

    @contextlib.contextmanager
    def memory(self, operation: str, rollout_id: str, tag: RolloutTag) -> Iterator[OtelSpan]:
        current = self.current()
        parent = current.otel.get_span_context() if isinstance(current, OtelSpan) else self._own(rollout_id)
        values = {names.OPERATION: operation, names.STORE: tag.scope, **self._facts(rollout_id, tag)}
        with self._open(f"{operation} {tag.scope}", parent, values) as span:
            yield span

    def rollout_ended(self, rollout_id: str, since: float, shown: Collection[int] | None = None) -> None:
        try:  # of a task and events that may hold anything
            self._rollout_ended(rollout_id, since, shown)
        except Exception as error:
            log.warning("a rollout has no span", rollout_id=rollout_id, error=described(error))

    def _rollout_ended(self, rollout_id: str, since: float, shown: Collection[int] | None) -> None:
        if (rollout := upstream.rollout_of(rollout_id)) is None:
            return
        events, local = upstream.events_of(rollout_id), rollout.config.local
        task = json.dumps(redacted({"": rollout.input})[""], ensure_ascii=False, default=str)
        values: dict[str, Any] = {
            names.OPERATION: names.AGENT,
            names.AGENT_NAME: local.agent_class if local else None,
            names.ATTEMPT: upstream.attempt_of(rollout_id),
            names.TASK: self._cleaned(task[:_TASK_CHARACTERS]),
            **self._facts(rollout_id),
        }
        if shown is not None:
            values |= {names.TIPS_SHOWN: len(shown), names.TIP_IDS: sorted(shown)}
        name = f"{names.AGENT} {values[names.AGENT_NAME] or ''}".strip()
        reward = next(reversed(upstream.rewards_of(rollout_id)), None)
        planned = trace_of(rollout_id)
        with self._open(name, self._joined.get(rollout_id), values, since=since, planned=planned) as span:
            if isinstance(reward, int | float) and math.isfinite(reward):
                span.set({names.RETURN: float(reward)})
                span.otel.add_event(
                    names.EVALUATION, {names.EVALUATION_NAME: "reward", names.EVALUATION_SCORE: float(reward)}
                )
            if rollout.status.state != upstream.RolloutState.SUCCEEDED:
                calls = data_of(events, MODEL_EVENT)
                answered = any(call.get("status") == "ok" for call in calls)
                cause = cause_of_failure(rollout.status.error_message, calls, answered=answered)
                error = reported_error(events)
                said = error or rollout.status.error_message or "it was deleted before it ended"
                span.set({names.FAILURE: cause})
                span.fail(error.type if error else cause, self._cleaned(str(said)))

    def updated(self, step: int, results: Sequence[UpdateResult]) -> None:
        for result in results:
            own = self._own(result.rollout_id)
            values = {
                names.OPERATION: names.UPDATE,
                names.CONVERSATION: result.rollout_id,
                names.STEP: step,
                names.RETURN: result.return_,
                names.ADVANTAGE: result.advantage,
                names.MASKED_TOKENS: result.masked_tokens,
                names.DROPPED: result.dropped,
                **_mode(result),
            }
            with self._open(names.UPDATE, own, values, links=[otel.Link(own)]):
                pass

    def metrics(self) -> dict[str, float]:
        """Return ``empo2/spans_lost`` since the last call."""
        return {"empo2/spans_lost": self._sender.newly_lost()}

    async def close(self, seconds: float) -> None:
        thread = threading.Thread(target=self._queue.shutdown, daemon=True)  # it waits for the collector
        thread.start()
        await asyncio.to_thread(thread.join, seconds)
        if waiting := self._sender.waiting:
            log.warning(f"{waiting} spans lost: the collector did not take them before the gateway ended")

    def _own(self, rollout_id: str) -> otel.SpanContext:
        """Return the context of a rollout's own span, which is sent when the rollout ends."""
        trace_id, span_id = trace_of(rollout_id)
        if joined := self._joined.get(rollout_id):
            return otel.SpanContext(joined.trace_id, span_id, True, joined.trace_flags, joined.trace_state)
        return otel.SpanContext(trace_id, span_id, True, otel.TraceFlags(otel.TraceFlags.SAMPLED))

    def _facts(self, rollout_id: str, tag: RolloutTag | None = None) -> dict[str, Any]:
        """Return what all spans of a rollout say, whether it has a tag or not."""
        rollout, tag = upstream.rollout_of(rollout_id), tag or upstream.tag_of(rollout_id)
        facts = {names.PROVIDER: self._provider_name, **_mode(tag or Mode())}
        if tag:
            facts |= {names.SCOPE: tag.scope, names.STEP: tag.step}
        if rollout and rollout_id != SERVED:
            facts |= {names.CONVERSATION: rollout_id, names.PHASE: "training" if rollout.is_train else "validation"}
        return facts

    @contextlib.contextmanager
    def _open(
        self,
        name: str,
        parent: otel.SpanContext | None,
        values: Mapping[str, Any],
        kind: otel.SpanKind = otel.SpanKind.INTERNAL,
        links: Sequence[otel.Link] = (),
        since: float | None = None,
        planned: tuple[int, int] | None = None,
    ) -> Iterator[OtelSpan]:
        """Open a span as the current one; an exception fails it.

        Args:
            planned: the ids of the trace, if there is no parent, and of the span; None for random ones.
        """
        context = otel.set_span_in_context(otel.NonRecordingSpan(parent), Context()) if parent else Context()
        given = {name: value for name, value in values.items() if value is not None}
        start = None if since is None else int(since * 1e9)
        self._ids.planned = planned
        started = self._tracer.start_span(name, context, kind, given, links, start)
        span = OtelSpan(started, values[names.OPERATION], self._texts)
        token = self._current.set(span)
        try:
            yield span
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            self._current.reset(token)
            span.end()


def _mode(mode: Mode) -> dict[str, Any]:
    return {names.ROLLOUT_MODE: mode.rollout_mode, names.UPDATE_MODE: mode.update_mode}


class _Ids(RandomIdGenerator):
    """Gives random ids, or those that are planned."""

    planned: tuple[int, int] | None = None  # of a trace and a span

    def generate_trace_id(self) -> int:
        return self.planned[0] if self.planned else super().generate_trace_id()

    def generate_span_id(self) -> int:
        return self.planned[1] if self.planned else super().generate_span_id()


class _Texts:
    """Cleans texts as tips and logs are cleaned, of special tokens and of secrets; writes the conventions' forms."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        def clean(text: str) -> str:
            return "\n".join(clean_tip(line, special_tokens) for line in redacted(text).splitlines())

        self._clean = lru_cache(maxsize=4096)(clean)  # a chat is sent again with each of its turns

    def told(self, value: str | Sequence[str]) -> str:
        """Return a text, or texts as JSON of memory records."""
        if isinstance(value, str):
            return self._clean(value)
        return json.dumps([{"content": self._clean(each)} for each in value], ensure_ascii=False)

    def messages(self, messages: Sequence[Message], **more: str) -> str:
        """Return messages as JSON; of parts that are no text the type alone."""
        return json.dumps([{**self._message(each), **more} for each in messages], ensure_ascii=False)

    def _message(self, message: Message) -> dict[str, Any]:
        content, role = message.get("content"), message["role"]
        if role == "tool":
            response = {"id": message.get("tool_call_id"), "response": self._clean(text_of(content))}
            return {"role": role, "parts": [{"type": "tool_call_response", **response}]}
        given = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        parts = [
            {"type": part["type"]} | ({"content": self._clean(part["text"])} if "text" in part else {})
            for part in given
        ]
        for call in message.get("tool_calls") or []:
            function = {"name": call["function"]["name"], "arguments": self._clean(str(call["function"]["arguments"]))}
            parts.append({"type": "tool_call", "id": call.get("id"), **function})
        return {"role": role, "parts": parts}


class _Sender(SpanExporter, logging.Handler):
    """Sends spans to the collector, counts those that are lost, and says once why.

    It is the handler of OpenTelemetry's own log, which would say it every few seconds.
    """

    def __init__(self, endpoint: str) -> None:
        logging.Handler.__init__(self, logging.ERROR)
        self._exporter, self._endpoint = OTLPSpanExporter(endpoint), redacted(endpoint)
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self], False
        self._why, self._said = "", False
        self._queued = self._taken = self._refused = self._failed = self._told = 0  # each is changed by one thread

    @property
    def waiting(self) -> int:
        return self._queued - self._taken

    def emit(self, record: logging.LogRecord) -> None:
        self._why = " ".join(record.getMessage().split())[:300]

    def takes(self) -> bool:
        """Return whether one more span may wait; it is lost if not."""
        if self.waiting < _QUEUE_SPANS:
            self._queued += 1
            return True
        self._refused += 1
        self._say(f"{_QUEUE_SPANS} wait for it")
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self._taken += len(spans)
        if result is SpanExportResult.SUCCESS:
            self._said = False
        else:
            self._failed += len(spans)
            self._say(self._why)
        return result

    def newly_lost(self) -> int:
        before, self._told = self._told, self._refused + self._failed
        return self._told - before

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            log.warning(f"spans are lost: the collector at {self._endpoint} does not take them: {why}")


class _Queue(BatchSpanProcessor):
    """Holds the spans that wait, for the thread that sends them."""

    def __init__(self, sender: _Sender) -> None:
        super().__init__(sender, max_queue_size=_QUEUE_SPANS, max_export_batch_size=_BATCH_SPANS)
        self._sender = sender

    def on_end(self, span: ReadableSpan) -> None:
        if self._sender.takes():
            super().on_end(span)
