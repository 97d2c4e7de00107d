"""agent-lightning's gateway with a memory: its own app, one ASGI middleware and the ``/empo2`` routes.

For rollouts that the trainer tagged (``metadata.empo2``) the middleware shows tips in their requests, records one
``empo2_call`` event beside each of agent-lightning's ``model_request`` events, and asks for a tip when they end. All
other traffic passes through byte for byte.
"""

import json
import re
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from agentlightning.schemas import TERMINAL_STATES
from agentlightning.server.app import _build_auth_dependency, create_app
from agentlightning.server.store import _events, _rollouts
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from empo2.memory import EmbedderError, MemoryFileError
from empo2.recipe.config import Settings
from empo2.recipe.gateway.episodes import Episode, EpisodeMemory
from empo2.recipe.gateway.recall import Recall

_CALL = re.compile(r"/proxy/rollout/([^/]+)/attempt/([^/]+)/mode/train/openai/v1/(chat/completions|completions)")
_ROLLOUT = re.compile(r"/api/rollouts/([^/]+)")


class MemoryMiddleware:
    """Sees an agent's calls before vLLM does, and a rollout's end before the trainer does."""

    def __init__(self, app: ASGIApp, *, memory: EpisodeMemory, key: str) -> None:
        self._app = app
        self._memory = memory
        self._authenticate = _build_auth_dependency(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        method, path = scope["method"], scope["path"]
        if method == "POST" and (match := _CALL.fullmatch(path)):
            episode = self._memory.episode(match[1])
            if episode is not None and await self._allowed(scope):
                return await self._call(episode, match[2], scope, receive, send)
        elif method == "PATCH" and (match := _ROLLOUT.fullmatch(path)):
            episode = self._memory.episode(match[1])
            if episode is not None:
                return await self._patch(episode, scope, receive, send)
        elif method == "POST" and path == "/api/models":
            # vLLM is up. Earlier, the embedder would compete with verl and vLLM for the cores while they start.
            self._memory.start()
        elif method == "DELETE" and (match := _ROLLOUT.fullmatch(path)):
            await self._app(scope, receive, send)
            if match[1] not in _rollouts:
                self._memory.forget(match[1])
            return None
        return await self._app(scope, receive, send)

    async def _allowed(self, scope: Scope) -> bool:
        try:
            await self._authenticate(Request(scope))
        except HTTPException:
            return False  # the app answers
        return True

    async def _call(self, episode: Episode, attempt_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        raw, receive = await _read(receive)
        body = _json_object(raw)
        if body is None:
            return await self._app(scope, receive, send)
        plan = await self._memory.plan(episode, body)
        if plan.body is not body:
            scope, receive = _with_body(scope, receive, json.dumps(plan.body).encode())
        tip_free = self._memory.tokenize_without_tips(episode, body, plan)
        status, chunks = 0, []

        async def capture(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            chunks.append(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False) and status == 200:
                # Before the last byte leaves: the agent may report its reward and be gone a moment later.
                response = _json_object(b"".join(chunks))
                if response is not None:
                    self._memory.answered(episode, attempt_id, body, plan, tip_free, response)
            await send(message)

        try:
            await self._app(scope, receive, capture)
        finally:
            if status != 200 and tip_free is not None:
                tip_free.cancel()

    async def _patch(self, episode: Episode, scope: Scope, receive: Receive, send: Send) -> None:
        attempts = _events.get(episode.rollout_id, {})
        before = _rollouts[episode.rollout_id].status.state
        await self._app(scope, receive, send)
        rollout = _rollouts.get(episode.rollout_id)
        if rollout is None or before in TERMINAL_STATES or rollout.status.state not in TERMINAL_STATES:
            return
        events = [event for attempt in attempts.values() for event in attempt]
        self._memory.finished(episode, rollout.status.state, events)


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The request's body, and a ``receive`` that gives it again and then the client's own messages.

    The route waits for ``http.disconnect`` while it forwards: an agent that gives up must stay noticed.
    """
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return body, _replay(message, receive)
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body, _replay({"type": "http.request", "body": body, "more_body": False}, receive)


def _replay(message: Message, receive: Receive) -> Receive:
    first = [message]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def _with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    first = {"type": "http.request", "body": body, "more_body": False}
    state = [first]

    async def replaced() -> Message:
        if state:
            await receive()  # the agent's own body
            return state.pop()
        return await receive()

    return {**scope, "headers": headers}, replaced


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class DrainRequest(BaseModel):
    timeout: float


class FileRequest(BaseModel):
    path: str


def make_gateway(
    settings: Settings, *, model_path: str, key: str, memory_file: Path, recall: Recall | None = None
) -> FastAPI:
    """agent-lightning's app with EMPO²'s middleware and routes, to be served in the place of ``agl-server``.

    Args:
        model_path: the name that the trainer registers its vLLM servers under, a resolved ``model.path``.
        key: what every caller must present; empty for none.
        memory_file: the run's memory, created if absent.
    """
    app = create_app(
        {
            "key": key,
            "default_proxy": {
                "model_name": model_path,
                "include_log_probs": True,
                "train": {"temperature": settings.model.temperature},
                "val": {"temperature": settings.model.val_temperature},
            },
        }
    )
    recall = recall or Recall(settings, memory_file)
    memory = EpisodeMemory(settings, recall, special_tokens(model_path))
    app.add_middleware(MemoryMiddleware, memory=memory, key=key)
    app.include_router(_routes(memory, recall, model_path), dependencies=[Depends(_build_auth_dependency(key))])
    upstream_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        # Not agent-lightning's client: reflections would wait in its pool of 100 connections, and agents behind them.
        limits = httpx.Limits(max_connections=None)
        async with upstream_lifespan(app) as state, httpx.AsyncClient(limits=limits) as client:
            memory.router, memory.client = app.state.proxy_router, client
            try:
                yield state
            finally:
                await memory.drain(timeout=settings.reflection.timeout)
                await recall.close()

    app.router.lifespan_context = lifespan
    return app


def _routes(memory: EpisodeMemory, recall: Recall, model_path: str) -> APIRouter:
    router = APIRouter(prefix="/empo2", tags=["empo2"])

    @router.get("/state")
    async def state() -> dict[str, Any]:
        return {"model": model_path, "memory_size": await recall.size(), **memory.state()}

    @router.post("/rollouts/{rollout_id}/settle")
    async def settle(rollout_id: str) -> dict[str, str]:
        await memory.settle(rollout_id)
        return {"status": "ok"}

    @router.post("/drain")
    async def drain(request: DrainRequest) -> dict[str, float]:
        return await memory.drain(request.timeout)

    @router.post("/snapshot")
    async def snapshot(request: FileRequest) -> dict[str, str]:
        with _refusing(request.path):
            await recall.snapshot(Path(request.path))
        return {"path": request.path}

    @router.post("/restore")
    async def restore(request: FileRequest) -> dict[str, str]:
        with _refusing(request.path):
            await recall.restore(Path(request.path))
        return {"path": request.path}

    return router


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """What the memory refuses becomes an answer that says why."""
    try:
        yield
    except (EmbedderError, MemoryFileError, sqlite3.Error, OSError, ValueError) as error:
        raise HTTPException(409, detail=f"{path}: {error}") from None


def special_tokens(model_path: str) -> list[str]:
    """The tokens that a model's tokenizer adds to plain text, longest first (``tokenizer.json``).

    Raises:
        OSError: the model has no ``tokenizer.json``, or the hub cannot be reached for it.
    """
    file = Path(model_path) / "tokenizer.json"
    if not file.parent.is_dir():
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(model_path, "tokenizer.json"))
    added = json.loads(file.read_text())["added_tokens"]
    return sorted({token["content"] for token in added if token["content"].strip()}, key=len, reverse=True)
