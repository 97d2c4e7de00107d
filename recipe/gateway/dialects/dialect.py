"""What the dialects share: parts of a chat, how events are written to a stream, what an agent is told of an error."""

import contextlib
import json
import secrets
from collections.abc import Iterable
from functools import cache
from typing import Any

import structlog
from starlette.responses import Response

from empo2.recipe.gateway.request import Body

log = structlog.get_logger()

KEEP_ALIVE = ": the model generates\n\n"  # a comment, which clients skip
_MOST = 10_000  # kept of a rollout; only agents that have none (empo2 serve) come to as many
_CHARACTERS = 300  # of an error that is no JSON
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def with_headers(told: Response, answer: Response) -> Response:
    """Return what an agent is told, with the headers of the answer that it was made from."""
    for name, value in answer.headers.items():
        if name not in ("content-length", "content-type"):
            told.headers.append(name, value)
    return told


def error_of(answer: Response, *, anthropic: bool) -> Body:
    """Return the body of an error, from one in OpenAI's, agent-lightning's or FastAPI's form."""
    content, status = bytes(answer.body), answer.status_code
    problem, error = content.decode(errors="replace")[:_CHARACTERS], None
    with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
        body = json.loads(content)
        error = body.get("error", body.get("detail"))
        problem = error if isinstance(error, str) else str(error["message"])
    if anthropic:
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": problem}}
    if isinstance(error, dict) and "message" in error:
        return {"error": error}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": problem, "type": kind, "param": None, "code": None}}


def event_stream(events: Iterable[str]) -> Response:
    """Return server-sent events; all are known already, and are sent at once."""
    return Response("".join(events), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def event(data: Body, name: str | None = None) -> str:
    """Return one server-sent event, in ASCII: some clients take U+2028 and the like for the end of a line."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(data)}\n\n"


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def said_in(reply: Body) -> tuple[str, str | None, list[Body]]:
    """Return what a reasoning parser of vLLM took out of a reply ("" for nothing), its text, and its calls of tools.

    The text is None where a reply has only calls.
    """
    calls = reply.get("tool_calls") or []
    text = reply.get("content") or (None if calls else "")
    return reply.get("reasoning") or reply.get("reasoning_content") or "", text, calls


def keep[T](kept: dict[str, T], id_: str, value: T) -> None:
    """Keep what a later request may continue; the oldest goes where there is too much."""
    kept[id_] = value
    if len(kept) > _MOST:
        del kept[next(iter(kept))]


def text_part(text: str) -> Body:
    return {"type": "text", "text": text}


def image_part(url: Any) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


def tool_call(id_: Any, name: Any, arguments: str) -> Body:
    """Return a call of a tool as a chat has it."""
    return {"id": str(id_), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def tool_result(id_: Any, parts: list[Body]) -> tuple[Body, list[Body]]:
    """Return the message of a tool's result, and the images in it, which such a message cannot have."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    images = [part for part in parts if part["type"] != "text"]
    return {"role": "tool", "tool_call_id": str(id_), "content": "\n".join(texts)}, images


@cache  # once a process
def warn_not_offered(kind: str, owner: str) -> None:
    log.warning(f"tools of type {kind} need {owner}'s own servers: the model is not offered them")
