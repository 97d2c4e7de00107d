"""Spans of what the gateway does, sent to a collector (span_sender.py) if one is named; docs/traces.md shows them.

The ids of a rollout's own span follow from the rollout's id (`protocol.trace_of`). So the controller can tell an agent
its parent before the rollout ends, which is when that span is sent, and nothing is kept of a rollout between its calls.
An agent whose client sends a trace of its own keeps it: then the rollout's spans join that trace, and its own span is a
child of the span that made the first call. Of that trace alone the ids are kept, of the latest rollouts.
"""

import asyncio
import contextlib
import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import structlog
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from empo2.recipe.config import Settings, traces_endpoint
from empo2.recipe.failures import cause_of_failure, reported_error
from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.request import SERVED, Body, Request
from empo2.recipe.gateway.tips.text import clean_tip
from empo2.recipe.messages import Message, reply_of, text_of
from empo2.recipe.protocol import MODEL_EVENT, Mode, RolloutTag, UpdateResult, data_of, trace_of
from empo2.recipe.redaction import redacted

log = structlog.get_logger()

_W3C = TraceContextTextMapPropagator()
_JOINED = 10_000  # rollouts whose agents have traces of their own
_TASK_CHARACTERS = 1000
# Of what an agent or a server may send in the place of a chat: such a span lacks what cannot be read.
_MALFORMED = (LookupError, TypeError, AttributeError)


class Span:
    """What is told of one call, or of one operation of the memory.

    Args:
        span: OpenTelemetry's, which may drop all that it is told.
        operation: begins its name.
        texts: cleans what is told; None if nobody asks for texts.
    """

    def __init__(self, span: otel.Span, operation: str = "", texts: "_Texts | None" = None) -> None:
        self.otel = span
        self._operation = operation
        self._texts = texts
        self._waits_for, self._ended = 1, 0

    def set(self, values: Mapping[str, Any]) -> None:
        """Add attributes; those that are None are left out."""
        self.otel.set_attributes({name: value for name, value in values.items() if value is not None})

    def tell(self, values: Mapping[str, str | Sequence[str]]) -> None:
        """Add texts, if the user has asked for texts."""
        if texts := self._texts:
            self.set({name: texts.told(value) for name, value in values.items()})

    def asked(self, body: Body) -> None:
        """Add what a request asks for: a chat completion's, a completion's, or one in another dialect."""
        if isinstance(model := body.get("model"), str):
            self.otel.update_name(f"{self._operation} {model}")
            self.set({names.REQUEST_MODEL: model})
        self.set({name: body[key] for key, name in names.REQUEST.items() if isinstance(body.get(key), int | float)})
        with contextlib.suppress(*_MALFORMED):
            if self._texts:
                messages = body.get("messages") or [{"role": "user", "content": body["prompt"]}]
                self.set({names.INPUT_MESSAGES: self._texts.messages(messages)})

    def answered(self, answer: Body | None) -> None:
        """Add what is said of the answer: a chat completion or a completion."""
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
        """Say that what the span stands for failed; ``error`` is of few values, such as a status."""
        self.set({names.ERROR: error})
        self.otel.set_status(otel.Status(otel.StatusCode.ERROR, message or None))

    def wait_for(self, task: asyncio.Task[Any]) -> None:
        """Send the span only when a task is done, which may still add to it; its end stays where it was."""
        self._waits_for += 1
        task.add_done_callback(lambda _: self.end())

    def end(self) -> None:
        """Send the span as soon as the tasks that it waits for are done."""
        self._ended = self._ended or time.time_ns()
        self._waits_for -= 1
        if not self._waits_for:
            self.otel.end(self._ended)


NO_SPAN = Span(otel.INVALID_SPAN)


class Traces:
    """Makes the spans of a gateway; none where no collector is named.

    Args:
        run: name of the run, in every span's resource.
        special_tokens: removed from texts.

    Raises:
        ConfigError: as `traces_endpoint`.
    """

    def __init__(self, settings: Settings, run: str, special_tokens: Sequence[str]) -> None:
        self._sender = None
        if (endpoint := traces_endpoint(settings)) is not None:
            from empo2.recipe.gateway.span_sender import SpanSender  # half a second, for which others need not wait

            self._sender = SpanSender(endpoint, run)
        self._provider_name = "openai" if settings.model.server else "vllm"
        captured = os.environ.get(names.CAPTURE, "").lower()  # "event_only" is for logs, which are not sent
        texts = _Texts(special_tokens)
        self._cleaned = texts.told
        self._texts = texts if captured in ("true", "span_only", "span_and_event") else None
        self._current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)
        self._joined: OrderedDict[str, otel.SpanContext] = OrderedDict()

    @property
    def are_sent(self) -> bool:
        return self._sender is not None

    def headers(self) -> dict[str, str]:
        """Return the headers of a request that is to be a child of the current span."""
        headers: dict[str, str] = {}
        _W3C.inject(headers, otel.set_span_in_context(self.current().otel, Context()))
        return headers

    def current(self) -> Span:
        """Return the innermost span that is open here."""
        return self._current.get()

    def call(self, request: Request) -> AbstractContextManager[Span]:
        """Open the span of an agent's call."""
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
        return self._open(operation, parent, values, otel.SpanKind.CLIENT, links)

    def memory(self, operation: str, rollout_id: str, tag: RolloutTag) -> AbstractContextManager[Span]:
        """Open the span of an operation of the memory: below the current call, or below the rollout."""
        if not self.are_sent:
            return nullcontext(NO_SPAN)
        current = self.current()
        parent = self._own(rollout_id) if current is NO_SPAN else current.otel.get_span_context()
        values = {names.OPERATION: operation, names.STORE: tag.scope, **self._facts(rollout_id, tag)}
        return self._open(f"{operation} {tag.scope}", parent, values)

    def rollout_ended(self, rollout_id: str, since: float, shown: Collection[int] | None = None) -> None:
        """Send the span of a rollout that has ended, or is about to be deleted.

        Args:
            since: when it began (Unix time, seconds).
            shown: ids of the tips that the attempt that counts was shown; None if the rollout has no tag.
        """
        try:  # of a task and events that may hold anything
            if self.are_sent:
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
        """Send what an update made of rollouts, as spans in their traces."""
        for result in results if self.are_sent else ():
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
        """Return ``empo2/spans_lost`` since the last call, if spans are sent."""
        return {"empo2/spans_lost": self._sender.newly_lost()} if self._sender else {}

    async def close(self, seconds: float) -> None:
        """Send what is left, for at most so many seconds."""
        if self._sender is not None:
            await self._sender.send_rest(seconds)

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
    ) -> Iterator[Span]:
        """Open a span as the current one; an exception fails it. ``planned``: see `SpanSender.start`."""
        assert self._sender is not None
        context = otel.set_span_in_context(otel.NonRecordingSpan(parent), Context()) if parent else Context()
        given = {name: value for name, value in values.items() if value is not None}
        start = None if since is None else int(since * 1e9)
        started = self._sender.start(planned, name, context, kind, given, links, start)
        span = Span(started, values[names.OPERATION], self._texts)
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
