"""What the dialects share: parts of a chat, and how events are written to a stream."""

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


def with_headers(told: Response, answer: Response) -> Response:
    """Return what an agent is told, with the headers of the answer that it was made from."""
    for name, value in answer.headers.items():
        if name not in ("content-length", "content-type"):
            told.headers.append(name, value)
    return told


def event_stream(events: Iterable[str]) -> Response:
    """Return server-sent events; all are known already, and are sent at once."""
    return Response("".join(events), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def event(data: Body, name: str | None = None) -> str:
    """Return one server-sent event, in ASCII: some clients take U+2028 and the like for the end of a line."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(data)}\n\n"


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def reasoning_of(message: Body) -> str:
    """Return what a reasoning parser of vLLM took out of a reply; "" where it did not."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


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


def content_of(parts: list[Body]) -> str | list[Body]:
    """Return parts as a message's content: one text alone is a string, since chat templates differ in joining parts."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


@cache  # once a process
def warn_not_offered(kind: str, owner: str) -> None:
    log.warning(f"tools of type {kind} need {owner}'s own servers: the model is not offered them")
