"""Read each request's body once, and refuse one that is too large, is not JSON, or holds no chat."""

import math
from dataclasses import replace
from typing import Any

import starlette.requests
from starlette.responses import Response

from empo2.recipe.gateway.request import Next, Request, parse, refusal

# The rest of a body that is too large is read and dropped, since a client sees no answer while it sends.
_DROPPED = 64


async def read_body(max_bytes: int, request: Request, forward: Next) -> Response:
    """Answer 413 or 400 to a body that has more than ``max_bytes``, or cannot be used.

    The trainer sends the tasks of a step in one, which is as large as they are.

    Raises:
        ClientDisconnect: the client hung up.
    """
    if request.method not in ("POST", "PUT", "PATCH"):
        return await forward(request)
    limit = math.inf if request.kind == "rollouts" and request.asker == "operator" else max_bytes
    chunks: list[bytes] = []
    size = 0
    async for chunk in starlette.requests.Request(request.scope, request.receive).stream():
        if size <= limit:
            chunks.append(chunk)
        size += len(chunk)
        if size > _DROPPED * limit:
            break
    if size > limit:
        said = f"gateway.max_request={max_bytes / 2**20:g} MiB"
        return refusal(413, f"the request has more than {said}; send less, or raise that setting")
    content = b"".join(chunks)
    try:
        body = parse(content) if content or request.is_call else None
        if request.is_call:
            check_call(body, request.api)
    except ValueError as error:
        return refusal(400, str(error))
    return await forward(replace(request, content=content, body=body))


def check_call(body: Any, api: str) -> None:
    """Check a model call.

    Raises:
        ValueError: the body is no object, a chat's messages have no known shape, or a completion has messages.
    """
    if not isinstance(body, dict):
        raise ValueError("the request's body must be a JSON object")
    if api == "completions" and "messages" in body:
        raise ValueError("messages: a completion has a prompt; send messages to chat/completions")
    if api != "chat/completions":
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
        calls = message.get("tool_calls")
        if not (calls is None or (isinstance(calls, list) and all(map(_is_tool_call, calls)))):
            raise ValueError(f"messages[{number}].tool_calls: must be a list of calls, such as of functions by name")


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str | None)


def _is_tool_call(call: Any) -> bool:
    function = call.get("function", {}) if isinstance(call, dict) else None  # OpenAI's custom tools are no functions
    named = isinstance(function, dict) and isinstance(function.get("name"), str | None)
    return named and isinstance(call.get("id"), str | None)
