"""ASGI middleware that lets an agent speak its dialect: behind it there are chat completions and completions only."""

import json
import re
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.dialects.anthropic_messages import AnthropicCall
from empo2.recipe.gateway.dialects.dialect import Body, Dialect
from empo2.recipe.gateway.dialects.responses import Conversation, ResponsesCall
from empo2.recipe.gateway.dialects.streams import StreamedCompletion
from empo2.recipe.gateway.stages.guard import check_call, parse, refusal, replayed

# A client of Anthropic's adds /v1 to the address that it is given, which may have one.
_CALL = re.compile(
    r"(/proxy/rollout/([^/]+)/attempt/[^/]+/mode/[^/]+/openai/v1/)"
    r"(chat/completions|completions|responses|(?:v1/)?messages)"
)
_BODY_HEADERS = (b"content-length", b"content-type", b"transfer-encoding")
_REFUSALS = {"messages": AnthropicCall.refusal, "responses": ResponsesCall.refusal}


class Translator:
    """Expects requests that `RequestGuard` has let through. Calls that are no dialect pass unchanged.

    Args:
        max_bytes: most bytes of a translated request, which may be larger than the agent's: a response that continues
            another one has its whole chat.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held: dict[str, tuple[Conversation, dict[str, Body]]] = {}  # by rollout: responses, Anthropic's threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _CALL.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if match is None:
            return await self._app(scope, receive, send)
        begin, rollout_id, kind = match[1], match[2], match[3].removeprefix("v1/")
        raw, rest = (await receive())["body"], receive
        receive = replayed(raw, rest)
        completions = kind.endswith("completions")
        if completions and b'"stream"' not in raw:  # most calls: their body is not read once more
            return await self._app(scope, receive, send)
        body = parse(raw)
        if completions and not body.get("stream"):
            return await self._app(scope, receive, send)
        try:
            dialect = self._dialect(kind, rollout_id, body)
            if dialect.path == "chat/completions":
                check_call(dialect.body, chat=True)
        except ValueError as error:
            return await _refused(kind, 400, str(error))(scope, rest, send)
        except (LookupError, TypeError, AttributeError):  # lists in the place of objects, and the like
            problem = f"the request is not one of /{kind}; see its reference"
            return await _refused(kind, 400, problem)(scope, rest, send)
        content = json.dumps(dialect.body).encode()
        if len(content) > self._max_bytes:
            problem = f"the chat has more than gateway.max_request={self._max_bytes / 2**20:.3g} MiB"
            return await _refused(kind, 413, problem)(scope, rest, send)
        await self._translated(dialect, begin + dialect.path, content)(scope, rest, send)

    def _dialect(self, kind: str, rollout_id: str, body: Body) -> Dialect:
        match kind:
            case "messages":
                return AnthropicCall(body, self._held_of(rollout_id)[1])
            case "responses":
                return ResponsesCall(body, self._held_of(rollout_id)[0])
            case _:
                return StreamedCompletion(kind, body)

    def _held_of(self, rollout_id: str) -> tuple[Conversation, dict[str, Body]]:
        if rollout_id not in self._held:
            self._held = {name: held for name, held in self._held.items() if upstream.exists(name)}
        return self._held.setdefault(rollout_id, (Conversation(), {}))

    def _translated(self, dialect: Dialect, path: str, content: bytes) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(name, value) for name, value in scope["headers"] if name not in _BODY_HEADERS]
            headers += [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
            inner = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
            status, answer, kept = await _whole(self._app, inner, replayed(content, receive))
            response = _answer(dialect, status, answer)
            for name, value in kept:
                response.headers.append(name, value)
            await response(scope, receive, send)

        return app


async def _whole(app: ASGIApp, scope: Scope, receive: Receive) -> tuple[int, bytes, list[tuple[str, str]]]:
    """Return the app's status, its whole body, and its headers but those of the body."""
    start: Message = {"status": 500, "headers": []}
    chunks: list[bytes] = []

    async def collect(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, collect)
    kept = [(name.decode(), value.decode()) for name, value in start["headers"] if name.lower() not in _BODY_HEADERS]
    return start["status"], b"".join(chunks), kept


def _answer(dialect: Dialect, status: int, answer: bytes) -> Response:
    if status != 200:
        return dialect.refusal(status, answer)
    try:
        return dialect.answer(json.loads(answer))
    except (LookupError, TypeError, AttributeError, ValueError):
        return dialect.refusal(502, bytes(refusal(502, "the model server's answer is no completion", call=True).body))


def _refused(kind: str, status: int, problem: str) -> Response:
    answer = refusal(status, problem, call=True)
    shown: Callable[[int, bytes], Any] | None = _REFUSALS.get(kind)
    return shown(status, bytes(answer.body)) if shown else answer
