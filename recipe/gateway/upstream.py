"""All uses of agent-lightning's server (1.0.2), including its private names, and the connections to model servers."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from typing import Any

import httpx
from agentlightning.schemas import DEFAULT_ATTEMPT_ID as DEFAULT_ATTEMPT_ID
from agentlightning.schemas import TERMINAL_STATES, RolloutCreate
from agentlightning.schemas import Rollout as Rollout
from agentlightning.schemas import RolloutState as RolloutState
from agentlightning.server import proxy as agent_lightning_proxy
from agentlightning.server.app import create_app
from agentlightning.server.proxy import NoServersError as NoServersError
from agentlightning.server.proxy import ProxyRouter
from agentlightning.server.routes.events import record_event
from agentlightning.server.routes.rollouts import enqueue_rollouts
from agentlightning.server.store import _events, _rollouts, _terminal_order
from fastapi import FastAPI, HTTPException

from empo2.recipe.config import Model
from empo2.recipe.protocol import REWARD_EVENT, RolloutTag, data_of


def proxy_settings(model: Model, model_path: str) -> dict[str, Any]:
    """Return agent-lightning's ``default_proxy``: the options that it forces on the agents' calls."""
    return {
        "model_name": model_path,
        "include_log_probs": True,
        "train": {"temperature": model.temperature},
        "val": {"temperature": model.val_temperature},
    }


def agent_lightning_app(proxy: dict[str, Any], key: str, client: httpx.AsyncClient, *, trained: bool = True) -> FastAPI:
    """Return agent-lightning's own app.

    Args:
        key: what every caller must present; empty for none.
        client: sends the agents' calls; closed by the caller. agent-lightning's own has at most 100 connections.
        trained: False for agents that nobody trains: they keep their temperature, and see no token ids.
    """
    agent_lightning_proxy._is_retryable_status = _is_tried_again
    app = create_app({"key": key, "default_proxy": proxy})
    own_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with own_lifespan(app) as state:
            app.state.http_client = client
            if not trained:
                app.state.proxy_router = ServingRouter(proxy)
            yield state

    app.router.lifespan_context = lifespan
    return app


def _is_tried_again(status: int) -> bool:
    """Return whether a call is sent again that the model server answers so.

    agentlightning 1.0.2 (`_is_retryable_status`) sends one six times for a 500, too, which is an error of the server
    itself: the agent hears of it after 17 seconds. Its own client tries again where that makes sense.
    """
    return status in (408, 409, 429, 502, 503, 504)


_POOLS = 32
_IDLE_SECONDS = 2  # a server closes idle connections, uvicorn after 5: a request on one that it is closing would fail


class Network(httpx.AsyncBaseTransport):
    """Many small pools of connections in the place of one, without a limit on any.

    A limit would let agents and reflections wait for each other's connections. One pool would look at all of its
    connections for each request (httpcore 1.0, ``AsyncConnectionPool._assign_requests_to_connections``): with 128 calls
    under way a request takes 8 ms of a core, spread over 32 pools 1.3 (docs/performance.md).
    """

    def __init__(self) -> None:
        context = httpx.create_ssl_context()
        unlimited = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS)
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=unlimited) for _ in range(_POOLS)]
        self._turns = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


_ERROR_CHARACTERS = 1000

# Fields of the gateway's requests that are vLLM's own; OpenAI's servers refuse a request that has one.
_NOT_OPENAI = ("return_token_ids", "top_k", "min_p", "repetition_penalty")


class OpenAITransport(Network):
    """Sends requests as any OpenAI-compatible server takes them: with its key, and without vLLM's own fields."""

    def __init__(self, key: str | None) -> None:
        super().__init__()
        self._key = key

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = {name: value for name, value in json.loads(request.content).items() if name not in _NOT_OPENAI}
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        sent = httpx.Request(request.method, request.url, headers=headers, json=body, extensions=request.extensions)
        return await super().handle_async_request(sent)


class JsonErrors(httpx.AsyncBaseTransport):
    """Gives each error that is no JSON as one with its text: agent-lightning's `forward_request` would tell ``{}``."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        if answer.status_code < 400 or answer.headers.get("content-type", "").startswith("application/json"):
            return answer
        text = (await answer.aread()).decode(errors="replace").strip()[:_ERROR_CHARACTERS]
        await answer.aclose()
        status = answer.status_code
        error = {"message": text or f"the model server answers {status}", "type": "server_error", "code": status}
        return httpx.Response(status, json={"error": error}, extensions=answer.extensions)

    async def aclose(self) -> None:
        await self._transport.aclose()


class ServingRouter(ProxyRouter):
    """Leaves agents their temperature; one without gets validation's. They see no token ids."""

    def prepare_body(self, body: dict[str, Any], mode: str) -> dict[str, Any]:
        if mode == "train":
            return super().prepare_body(body, mode)
        asked = body.get("temperature")
        return {**body, "model": self._model_name, "temperature": self._val_temperature if asked is None else asked}


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


def attempt_of(rollout_id: str) -> str:
    """Return the id of the attempt whose events count (``agentlightning.server.routes.events._query_events``)."""
    rollout = _rollouts.get(rollout_id)
    return (rollout.status.last_attempt_id if rollout else None) or DEFAULT_ATTEMPT_ID


def events_of(rollout_id: str) -> list[dict[str, Any]]:
    """Return the events of the attempt that counts, in their order, as they were posted."""
    events = _events.get(rollout_id, {}).get(attempt_of(rollout_id), [])
    return [{"event_type": event.event_type, "data": event.data} for event in events]


def rewards_of(rollout_id: str) -> list[Any]:
    """Return the values of the reward events of the attempt that counts, in their order."""
    return [data.get("value") for data in data_of(events_of(rollout_id), REWARD_EVENT)]


def unread_pairs() -> set[str]:
    """Return the paired groups of which the trainer has not read and deleted all rollouts."""
    return {tag.pair for tag in map(tag_of, _rollouts) if tag is not None and tag.pair is not None}


def unchanged_since(time: float) -> Iterator[str]:
    """Yield the ids of rollouts in which nothing has happened since then (Unix time, seconds)."""
    for rollout_id, rollout in list(_rollouts.items()):
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


def replace_response(rollout_id: str, attempt_id: str, response: dict[str, Any]) -> None:
    """Put a changed response into the event of its call, which has the same id."""
    for event in reversed(_events.get(rollout_id, {}).get(attempt_id, [])):
        if event.event_type == "model_request" and event.data["response"].get("id") == response.get("id"):
            event.data["response"] = response
            break


class ModelServers:
    """Client of the policy's vLLM servers. It asks them directly: a call on a rollout's URL would become a trained row.

    A rollout's requests go to the server that agent-lightning sends the agent's own calls to, since its prefix cache
    holds the episode.
    """

    def __init__(self, proxy: dict[str, Any], client: httpx.AsyncClient) -> None:
        self._router = ProxyRouter(proxy)
        self._client = client

    async def post(self, rollout_id: str, path: str, body: dict[str, Any], timeout: float) -> httpx.Response:
        """Send a request; ``path`` is relative to ``/v1``, or is ``/tokenize``, which is at the root.

        Raises:
            NoServersError: no server is registered.
            httpx.HTTPError: no answer within ``timeout`` seconds.
        """
        base, model = self._address(rollout_id)
        url = base.removesuffix("/v1") + path if path == "/tokenize" else base + path
        return await self._client.post(url, json={**body, "model": model}, timeout=timeout)

    async def stream(self, rollout_id: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        """Send a request, and return its answer before it has been read; the caller closes it.

        Raises:
            As `post`.
        """
        base, model = self._address(rollout_id)
        headers = {name: value for name, value in headers.items() if name != "content-type"}
        request = self._client.build_request("POST", base + path, json={**body, "model": model}, headers=headers)
        return await self._client.send(request, stream=True)

    def version(self, rollout_id: str) -> int | None:
        """Return the version of the policy on a rollout's server; None if there is no server."""
        with suppress(NoServersError):
            return self._router.select_server(self._router.model_name, rollout_id).version

    def _address(self, rollout_id: str) -> tuple[str, str]:
        server = self._router.select_server(self._router.model_name, rollout_id)
        return server.endpoint.rstrip("/"), server.model
