"""What a dialect is, and how events are written to a stream."""

import json
import secrets
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.responses import Response

from empo2.recipe.gateway.request import Body


class Dialect(Protocol):
    """One request of an agent, translated.

    Attributes:
        path: that the translated request is sent to, relative to ``/v1``.
        body: the translated request.
    """

    path: str
    body: Body

    def answer(self, completion: Body) -> Response:
        """Return the agent's answer, made from the whole answer to the translated request.

        Raises:
            LookupError, TypeError, AttributeError: that is no completion.
        """
        ...

    @staticmethod
    def refusal(status: int, answer: bytes) -> Response:
        """Return an error in the dialect's form, from one in OpenAI's or agent-lightning's."""
        ...


def as_openai_says(status: int, answer: bytes) -> Response:
    """Return an error as it is: OpenAI's dialects share one form."""
    return Response(answer, status, media_type="application/json")


def problem_in(answer: bytes) -> str:
    """Return the message of an error in OpenAI's or agent-lightning's form."""
    try:
        body = json.loads(answer)
    except ValueError:
        body = None
    if isinstance(body, dict):
        error = body.get("error", body.get("detail"))
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return error["message"]
        if isinstance(error, str):
            return error
    return answer.decode(errors="replace")[:300]


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


def image_part(url: Any) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: list[Body]) -> str | list[Body]:
    """Return parts as a message's content: one text alone is a string, since chat templates differ in joining parts."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts
