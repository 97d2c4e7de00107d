"""ASGI middleware that handles an agent's calls before vLLM, and a rollout's end before the trainer.

Traffic that does not belong to a tagged rollout passes through unchanged. The one exception are the training calls of
plain GRPO, whose rollouts have no tag: they are sampled like those of EMPO², so that the two can be compared.
"""

import json
import re
from typing import Any

from fastapi import HTTPException, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from empo2.recipe.gateway import sampling, upstream
from empo2.recipe.gateway.call import ModelCall, count_sampling
from empo2.recipe.gateway.episode import Episode, Episodes
from empo2.recipe.gateway.reflector import Reflector
from empo2.recipe.gateway.services import Services

_CALL = re.compile(r"/proxy/rollout/([^/]+)/attempt/([^/]+)/mode/(train|val)/openai/v1/(chat/completions|completions)")
_ROLLOUT = re.compile(r"/api/rollouts/([^/]+)")


class MemoryMiddleware:
    def __init__(self, app: ASGIApp, *, services: Services, episodes: Episodes, reflector: Reflector, key: str) -> None:
        self._app = app
        self._services = services
        self._episodes = episodes
        self._reflector = reflector
        self._authenticate = upstream.authentication(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        method, path = scope["method"], scope["path"]
        if method == "POST" and (match := _CALL.fullmatch(path)):
            episode, is_train = self._episodes.of(match[1]), match[3] == "train"
            if episode is not None and (is_train or episode.tag.read_only) and await self._allowed(scope):
                return await self._call(episode, match[2], scope, receive, send)
            is_grpo = episode is None and self._services.settings.algorithm.name == "grpo"
            if is_train and is_grpo and await self._allowed(scope):
                return await self._call_without_memory(scope, receive, send)
        elif method == "PATCH" and (match := _ROLLOUT.fullmatch(path)):
            episode = self._episodes.of(match[1])
            if episode is not None:
                return await self._patch(episode, scope, receive, send)
        elif method == "POST" and path == "/api/models":
            # Not before vLLM is up: the embedder would compete with verl and vLLM for the cores while they start.
            if self._services.settings.algorithm.name == "empo2":
                self._services.memory.start()
        elif method == "DELETE" and (match := _ROLLOUT.fullmatch(path)):
            await self._app(scope, receive, send)
            if not upstream.exists(match[1]):
                self._episodes.forget(match[1])
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
        call = await ModelCall.prepare(self._services, episode, attempt_id, body)
        status, chunks, recorded = 0, [], False

        async def capture(message: Message) -> None:
            nonlocal status, recorded
            status = message.get("status", status)
            chunks.append(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False) and status == 200:
                # Before the last byte leaves: the agent may report its reward and be gone a moment later.
                response = _json_object(b"".join(chunks))
                if response is not None:
                    call.answered(response)
                    recorded = True
            await send(message)

        scope, receive = _with_body(scope, receive, json.dumps(call.sent).encode())
        try:
            await self._app(scope, receive, capture)
        finally:
            if not recorded:
                call.refused(status, _json_object(b"".join(chunks)))

    async def _call_without_memory(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw, receive = await _read(receive)
        body = _json_object(raw)
        if body is not None:
            count_sampling(self._services, body)
            scope, receive = _with_body(scope, receive, json.dumps(sampling.neutral(body)).encode())
        await self._app(scope, receive, send)

    async def _patch(self, episode: Episode, scope: Scope, receive: Receive, send: Send) -> None:
        rollout_id = episode.rollout_id
        events, ended_before = upstream.events_of(rollout_id), upstream.has_ended(rollout_id)
        await self._app(scope, receive, send)
        if not ended_before and upstream.has_ended(rollout_id):
            rewards = [event.data.get("value") for event in events if event.event_type == "reward"]
            self._reflector.finished(episode, succeeded=upstream.has_succeeded(rollout_id), rewards=rewards)


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """Read the request's body; return it with a ``receive`` that replays it and then passes on the client's messages.

    The route waits for ``http.disconnect`` while it forwards, so that it notices an agent that gives up.
    """
    chunks, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(chunks), _replay(message, receive)
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(chunks)
    return body, _replay({"type": "http.request", "body": body, "more_body": False}, receive)


def _replay(message: Message, receive: Receive) -> Receive:
    first = [message]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def _with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """Return scope and ``receive`` of the same request with a different body."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def replaced() -> Message:
        if first:
            await receive()  # the agent's own body
            return first.pop()
        return await receive()

    return {**scope, "headers": headers}, replaced


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
