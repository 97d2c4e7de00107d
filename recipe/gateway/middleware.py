"""ASGI middleware that handles an agent's calls before vLLM, and a rollout's end before the trainer.

Traffic that does not belong to a tagged rollout passes through unchanged. The one exception are the training calls of
plain GRPO, whose rollouts have no tag: they are sampled like those of EMPO², so that the two can be compared.
"""

import json
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.call import ModelCall, PlainCall
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.serve.direct_calls import SERVED, DirectChats
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.guard import parse, replayed

_ROLLOUT = re.compile(r"/api/rollouts/([^/]+)")


class MemoryMiddleware:
    """Expects requests that `KeyCheck` and `RequestGuard` have let through.

    Args:
        chats: of agents that have no rollout; None if they are shown no tips.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        services: Services,
        episodes: Episodes,
        reflector: Reflector,
        chats: DirectChats | None = None,
    ) -> None:
        self._app = app
        self._chats = chats
        self._services = services
        self._episodes = episodes
        self._reflector = reflector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        method, path = scope["method"], scope["path"]
        if method == "POST" and (match := upstream.MODEL_CALL.fullmatch(path)):
            self._services.metrics.counts["requests"] += 1
            if self._chats is not None and match[1] == SERVED:
                body = await _body(receive)
                call = await ModelCall.prepare(self._services, self._chats.episode(body), body)
                return await self._play(call, scope, receive, send)
            episode, is_train = self._episodes.of(match[1], match[2]), match[3] == "train"
            if episode is not None and (is_train or episode.tag.read_only):
                call = await ModelCall.prepare(self._services, episode, await _body(receive))
                return await self._play(call, scope, receive, send)
            if is_train and episode is None and self._services.settings.algorithm.name == "grpo":
                replies = self._episodes.replies_of(match[1], match[2])
                call = await PlainCall.prepare(self._services, match[1], replies, await _body(receive))
                return await self._play(call, scope, receive, send)
        elif method == "PATCH" and (match := _ROLLOUT.fullmatch(path)):
            return await self._patch(match[1], scope, receive, send)
        elif method == "DELETE" and (match := _ROLLOUT.fullmatch(path)):
            await self._app(scope, receive, send)
            if not upstream.exists(match[1]):
                self._episodes.forget(match[1])
            return None
        return await self._app(scope, receive, send)

    async def _play(self, call: ModelCall | PlainCall, scope: Scope, receive: Receive, send: Send) -> None:
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

    async def _patch(self, rollout_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        async def capture(message: Message) -> None:
            # Before the answer leaves: the trainer may read and delete the rollout a moment later.
            if message.get("status") == 200 and upstream.has_ended(rollout_id):
                episode = self._episodes.conclude(rollout_id)
                if episode is not None:
                    rewards = upstream.rewards_of(rollout_id)
                    self._reflector.finished(episode, succeeded=upstream.has_succeeded(rollout_id), rewards=rewards)
            await send(message)

        await self._app(scope, receive, capture)


async def _body(receive: Receive) -> dict[str, Any]:
    """Return the body that `RequestGuard` has read and checked."""
    return parse((await receive())["body"])


def _with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """Return scope and ``receive`` of the same request with a different body."""
    headers = [
        (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")
    ]
    headers.append((b"content-length", str(len(body)).encode()))
    return {**scope, "headers": headers}, replayed(body, receive)


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
