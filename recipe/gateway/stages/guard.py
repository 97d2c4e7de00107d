"""Refuse requests that are too large, are not JSON, or hold no chat, before any other work is done on them."""

import json
import math
import re
from typing import Any

from pydantic_core import from_json
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CALL = re.compile(r"/proxy/rollout/[^/]+/attempt/[^/]+/mode/[^/]+/openai/v1/(.+)")
_EVENTS = re.compile(r"/api/rollouts/[^/]+/attempt/[^/]+/events")
# The rest of a body that is too large is read and dropped, since a client sees no answer while it sends.
_DROPPED = 64


class RequestGuard:
    """ASGI middleware that reads each request's body once and answers 413 or 400 to one that cannot be used.

    A model call gets its error in OpenAI's form, any other request in agent-lightning's.

    Args:
        max_bytes: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self._app(scope, receive, send)
        body = await self._read(receive)
        if body is None:
            return None  # the client is gone
        call = _CALL.fullmatch(scope["path"])
        if len(body) > self._max_bytes:
            limit = f"{self._max_bytes / 2**20:g}"
            problem = f"the request has more than gateway.max_request={limit} MiB; send less, or raise that setting"
            return await refusal(413, problem, call=bool(call))(scope, receive, send)
        try:
            value = parse(body) if body or call else None
            if call:
                check_call(value, chat=call[1] == "chat/completions")
            elif _EVENTS.fullmatch(scope["path"]):
                _check_event(value)
        except ValueError as error:
            return await refusal(400, str(error), call=bool(call))(scope, receive, send)
        await self._app(scope, replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body, or its begin if it is too large; None if the client hung up."""
        chunks: list[bytes] = []
        size, more = 0, True
        while more and size <= _DROPPED * self._max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            if size <= self._max_bytes:
                chunks.append(chunk)
            size += len(chunk)
            more = message.get("more_body", False)
        return b"".join(chunks)


def parse(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: not JSON, nested deeper than 200, or with something that JSON cannot carry: NaN, a number beyond a
            double's range, half of a surrogate pair. The message says which and holds nothing of the text.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"the request's body is not JSON that can be used: {error}") from None
    return value


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that returns the body and then passes on the client's messages.

    The route waits for ``http.disconnect`` while it forwards, so that it notices an agent that gives up.
    """
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again


def refusal(status: int, problem: str, *, call: bool) -> JSONResponse:
    """Return an error in OpenAI's form for a model call, in agent-lightning's for any other request."""
    error = {"message": problem, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error} if call else {"detail": problem}, status)


def check_call(body: Any, *, chat: bool) -> None:
    """Check a model call.

    Raises:
        ValueError: the body is no object, or a chat's messages have no known shape.
    """
    if not isinstance(body, dict):
        raise ValueError("the request's body must be a JSON object")
    if not chat:
        return
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list of at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}]: must be an object with a role and a content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not (content is None or (isinstance(content, str | list) and all(map(_is_part, parts)))):
            raise ValueError(f"messages[{number}].content: must be a string, null, or a list of parts such as text")


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str | None)


def _check_event(event: Any) -> None:
    """Raise ValueError for a reward that no double can hold: it would stop the trainer that reads it."""
    data = event.get("data") if isinstance(event, dict) else None
    value = data.get("value") if isinstance(data, dict) else None
    if isinstance(value, int | float):
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise ValueError("data.value: must be a number that a double can hold")
