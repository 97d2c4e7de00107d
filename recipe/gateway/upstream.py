"""All uses of agent-lightning's server (1.0.2), including its private names."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import orjson
from agentlightning.schemas import DEFAULT_ATTEMPT_ID as DEFAULT_ATTEMPT_ID
from agentlightning.schemas import TERMINAL_STATES, Event, RolloutCreate
from agentlightning.schemas import Model as Server
from agentlightning.schemas import Rollout as Rollout
from agentlightning.schemas import RolloutState as RolloutState
from agentlightning.server import proxy as agent_lightning_proxy
from agentlightning.server.app import create_app
from agentlightning.server.proxy import NoServersError as NoServersError
from agentlightning.server.proxy import (
    ProxyRouter,
    _capture_event,
    _dec_inflight,
    _send_upstream_with_retries,
    _status_from_http_status,
)
from agentlightning.server.routes.events import (
    _dedupe_model_requests_by_prompt_token_ids,
    _query_events,
    _to_triplet_format,
    record_event,
)
from agentlightning.server.routes.rollouts import enqueue_rollouts
from agentlightning.server.store import _events, _rollouts, _terminal_order
from fastapi import FastAPI, HTTPException
from starlette.responses import Response

from empo2.recipe.config import Model
from empo2.recipe.gateway.continued import Continuations
from empo2.recipe.gateway.request import SERVED, Answer, Body, Next, Request, refusal, unless_hung_up
from empo2.recipe.gateway.server_client import ServerAnswer, ServerClient
from empo2.recipe.messages import opening_of
from empo2.recipe.protocol import CONTINUED, MODEL_EVENT, REWARD_EVENT, RolloutTag, data_of, whole_events

# Answers after which a call is sent again. agentlightning 1.0.2 (`_is_retryable_status`) does so after a 500, too, an
# error of the server itself: the agent would hear of it after 17 seconds, and its own client tries again.
_TRIED_AGAIN = (408, 409, 429, 502, 503, 504)


def proxy_settings(model: Model, model_path: str) -> dict[str, Any]:
    """Return agent-lightning's ``default_proxy``: the options that it forces on the agents' calls."""
    return {
        "model_name": model_path,
        "include_log_probs": True,
        "train": {"temperature": model.temperature},
        "val": {"temperature": model.val_temperature},
    }


def agent_lightning_app(proxy: dict[str, Any], key: str) -> FastAPI:
    """Return agent-lightning's own app; an empty key for none. Completions do not reach it (`Completions`)."""
    agent_lightning_proxy._is_retryable_status = lambda status: status in _TRIED_AGAIN
    return create_app({"key": key, "default_proxy": proxy})


class ModelServers:
    """Client of the policy's vLLM servers. It asks them directly: a call on a rollout's URL would become a trained row.

    A rollout's requests go to the server that agent-lightning sends the agent's own calls to, since its prefix cache
    holds the episode.
    """

    def __init__(self, proxy: dict[str, Any], client: ServerClient) -> None:
        self.router, self.client = ProxyRouter(proxy), client

    def of(self, rollout_id: str) -> Server:
        """Return the server of a rollout; raises `NoServersError` if none is registered."""
        return self.router.select_server(self.router.model_name, rollout_id)

    async def post(self, rollout_id: str, path: str, body: Body, timeout: float) -> ServerAnswer:
        """Send a request; ``path`` is relative to ``/v1``, or is ``/tokenize``, which is at the root.

        Raises:
            NoServersError: no server is registered.
            httpx.HTTPError: no answer within ``timeout`` seconds.
        """
        server = self.of(rollout_id)
        base = server.endpoint.rstrip("/")
        url = base.removesuffix("/v1") + path if path == "/tokenize" else base + path
        return await self.client.post(url, json={**body, "model": server.model}, timeout=timeout)

    def version(self, rollout_id: str) -> int | None:
        """Return the version of the policy on a rollout's server; None if there is no server."""
        with suppress(NoServersError):
            return self.of(rollout_id).version


class Completions:
    """Sends agents' completions to the policy's servers and records them, as agent-lightning's route does.

    That is its ``llm_proxy`` and ``forward_request`` without what costs them most: dependencies, a second parse of the
    request, the answer written to be read again. And an answer that its events could not hold is refused.

    Args:
        app: agent-lightning's, whose pause is kept.
        servers: with a client of our own; agent-lightning's has at most 100 connections.
        trained: False for agents that nobody trains: they keep their temperature, and see no token ids.
        counts: of the step; ``answers_refused`` is counted here.
        paper: changes a request's body (``asked``) and picks the answer (``picked``) before it is recorded.
    """

    def __init__(
        self, app: FastAPI, servers: ModelServers, *, trained: bool, counts: Counter[str], paper: Any = None
    ) -> None:
        self._app, self._servers, self._trained, self._counts, self._paper = app, servers, trained, counts, paper

    async def __call__(self, request: Request, forward: Next) -> Response:
        """Return the model's answer, as the last stage; a client that hangs up ends the call."""
        if not request.is_completion:
            return await forward(request)
        return await unless_hung_up(request, self._answer(request))

    async def _answer(self, request: Request) -> Response:
        rollout_id, pause = request.rollout_id, self._app.state.proxy_pause_state
        if rollout_id not in _rollouts:
            return refusal(404, f"Rollout not found: {rollout_id}")
        try:
            # Where agents have no rollout, a chat keeps to a server.
            server = self._servers.of(rollout_id if rollout_id != SERVED else opening_of(request.body).hex())
        except NoServersError as error:
            return _unanswered(request, 503, str(error))
        async with pause.lock:
            if pause.paused:
                answer = Answer(orjson.dumps({"error": "gateway paused", "reason": pause.reason}), 429)
                answer.headers.update({"Retry-After": str(pause.retry_after_seconds), "X-Agl-Paused": "true"})
                return answer
            pause.inflight += 1
        try:
            url = f"{server.endpoint.rstrip('/')}/{request.api}"
            body, started = self._prepared(request), time.perf_counter()
            client: Any = self._servers.client
            response = await _send_upstream_with_retries(client=client, url=url, body=body)
            latency_ms = (time.perf_counter() - started) * 1000
            is_json = response.headers.get("content-type", "").startswith("application/json")
            content = response.content if is_json else b"{}"
            if (value := Answer(content).value) is None:
                self._counts["answers_refused"] += 1
                return _unanswered(request, 502, "the model server's answer is no JSON object that can be used")
            chats = continuations(rollout_id, request.attempt_id)
            if self._paper is not None and value and response.status_code == HTTPStatus.OK:
                value = await self._paper.picked(request, value, chats.calls)
                content = orjson.dumps(value)
            number, (asked, answered) = chats.calls, chats.code_call(body, value)
            _capture_event(
                rollout_id=rollout_id,
                attempt_id=request.attempt_id,
                request_body=asked,
                response_body=answered,
                server=server,
                latency_ms=latency_ms,
                http_status=response.status_code,
                status=_status_from_http_status(response.status_code),
                retry_count=response.extensions.get("agl_retry_count", 0),
            )
        except HTTPException as error:
            return _unanswered(request, error.status_code, error.detail)
        finally:
            await _dec_inflight(pause)
        return Answer(content, response.status_code, value=value, call=number, prompt=chats.prompt)

    def _prepared(self, request: Request) -> Body:
        """Return the body that is sent."""
        body = request.body if self._paper is None else self._paper.asked(request)
        prepared = self._servers.router.prepare_body(body, request.mode)
        if self._trained or request.mode == "train":
            if request.api == "completions" and body.get("logprobs"):
                prepared["logprobs"] = body["logprobs"]  # how many; agent-lightning's `True` is one
            return prepared
        temperature = prepared["temperature"] if body.get("temperature") is None else body["temperature"]
        return {**body, "model": prepared["model"], "temperature": temperature}


def _unanswered(request: Request, status: int, problem: str) -> Response:
    """Refuse a call that no model server has answered, and record it: its rollout does not fail by its agent."""
    chats = continuations(request.rollout_id, request.attempt_id)
    asked, answered = chats.code_call(request.body, {})
    event = {"request": asked, "response": answered, "status": "error", "http_status": status}
    record(request.rollout_id, request.attempt_id, MODEL_EVENT, event)
    return refusal(status, problem)


async def keep_open(rollout_id: str) -> None:
    """Create a rollout if it is not there."""
    await enqueue_rollouts([RolloutCreate(rollout_id=rollout_id, input={}, is_train=False)])


def forget_events(rollout_id: str) -> None:
    """Drop what was recorded of a rollout so far."""
    if rollout_id in _events:
        _events[rollout_id].clear()


def rollout_of(rollout_id: str) -> Rollout | None:
    """Return a rollout as it is now, since it is replaced, not changed; None if there is no such rollout."""
    return _rollouts.get(rollout_id)


class PerRollout[T](defaultdict[str, T]):
    """What is held of each rollout; when a new one comes, that of rollouts that are gone is dropped."""

    def __missing__(self, rollout_id: str) -> T:
        for gone in [each for each in self if each not in _rollouts]:
            del self[gone]
        return super().__missing__(rollout_id)


def tag_of(rollout_id: str) -> RolloutTag | None:
    """Return a rollout's tag; None if it has none or is not there."""
    rollout = _rollouts.get(rollout_id)
    return RolloutTag.read(rollout.metadata) if rollout else None


def is_over(rollout: Rollout) -> bool:
    return rollout.status.state in TERMINAL_STATES


def rollouts_ended() -> int:
    """Return the number of rollouts that have ended since the start, deleted ones included."""
    return len(_terminal_order)


def open_rollouts() -> list[Rollout]:
    """Return the rollouts that have not ended."""
    return [each for each in _rollouts.values() if not is_over(each)]


def statuses() -> dict[str, dict[str, Any]]:
    """Return the fields of each rollout's status, by its id."""
    return {rollout_id: vars(rollout.status) for rollout_id, rollout in _rollouts.items()}


def attempt_of(rollout_id: str) -> str:
    """Return the id of the attempt whose events count (``agentlightning.server.routes.events._query_events``)."""
    rollout = _rollouts.get(rollout_id)
    return (rollout.status.last_attempt_id if rollout else None) or DEFAULT_ATTEMPT_ID


class _Events(list[Event]):
    """The events of an attempt, with what is known of its chats: agent-lightning drops both together."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        super().__init__(events)
        self.chats = Continuations()


def continuations(rollout_id: str, attempt_id: str) -> Continuations:
    """Return what the events of an attempt leave out, since earlier ones had it; of a rollout that is gone nothing."""
    attempts = _events.get(rollout_id, {})
    if not isinstance(events := attempts.get(attempt_id), _Events):
        events = attempts[attempt_id] = _Events(events or ())
    return events.chats


def events_as_asked(rollout_id: str, asked: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Return the events of the attempt that counts, as agent-lightning's route does; None if there is no rollout.

    Args:
        asked: the query. ``format=continued`` is ours: events as they are held, for `protocol.whole_events`.
    """
    if rollout_id not in _rollouts:
        return None
    events = [vars(event) for event in _query_events(rollout_id)]
    if asked.get("format") != CONTINUED:
        events = whole_events(events)
    if kind := asked.get("event_type"):
        events = [event for event in events if event["event_type"] == kind]
    if asked.get("format") == "triplet":
        trimmed = [_to_triplet_format(Event(**event)) for event in events]
        events = [vars(event) for event in _dedupe_model_requests_by_prompt_token_ids(trimmed)]
    return events


def events_of(rollout_id: str) -> list[dict[str, Any]]:
    """Return the events of the attempt that counts, in their order, as they are held (`continuations`)."""
    events = _events.get(rollout_id, {}).get(attempt_of(rollout_id), [])
    return [{"event_type": event.event_type, "data": event.data} for event in events]


def rewards_of(rollout_id: str) -> list[Any]:
    """Return the values of the reward events of the attempt that counts, in their order."""
    return [data.get("value") for data in data_of(events_of(rollout_id), REWARD_EVENT)]


def unread_pairs() -> set[str]:
    """Return the paired groups of which the trainer has not read and deleted all rollouts."""
    return {tag.pair for tag in map(tag_of, _rollouts) if tag is not None and tag.pair is not None}


def unchanged_since(time: float) -> Iterator[str]:
    """Yield the ids of rollouts in which nothing has happened since then (Unix time, seconds), but for `SERVED`."""
    for rollout_id, rollout in list(_rollouts.items()):
        if rollout_id == SERVED:  # which keeps no events
            continue
        attempts = _events.get(rollout_id, {}).values()
        last = max((events[-1].timestamp for events in attempts if events), default=0.0)
        if max(rollout.status.updated_at, last) < time:
            yield rollout_id


def delete(rollout_id: str) -> None:
    """Delete a rollout and its events, as its route does."""
    _rollouts.pop(rollout_id, None)
    _events.pop(rollout_id, None)


def record(rollout_id: str, attempt_id: str, event_type: str, data: dict[str, Any]) -> bool:
    """Add an event to a rollout; return False if the rollout is gone."""
    try:
        record_event(rollout_id, attempt_id, event_type, data)
    except HTTPException:
        return False
    return True
