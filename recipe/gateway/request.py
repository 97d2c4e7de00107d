"""A request, read once: no stage matches a path or parses a body again."""

import asyncio
import re
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope

from empo2.recipe.json_text import dumped, loaded

log = structlog.get_logger()

Body = dict[str, Any]
Asker = Literal["operator", "controller", "agent"]
Kind = Literal["call", "rollouts", "rollout", "events", "attempt events", ""]

SERVED = "served"  # id of the one rollout of all agents that have none (``empo2 serve``)

_CALL = re.compile(r"/proxy/rollout/([^/]+)/attempt/([^/]+)/mode/(train|val)/openai/v1/(.+)")
# An agent's address ends with /v1; Anthropic's clients add another one, Azure's the name of a deployment.
_ADDED = re.compile(r"\A(?:v1/|(?:openai/)?deployments/[^/]+/)")
_ROLLOUTS = re.compile(r"/api/rollouts(?:/([^/]+)(?:/attempt/([^/]+)(?=/events))?(/events)?)?")
_BODY_HEADERS = (b"content-length", b"content-type", b"transfer-encoding")


@dataclass(frozen=True)
class Request:
    """One HTTP request; a stage passes it on as it is, or a changed copy."""

    scope: Scope
    receive: Receive
    # What its path names: ``call`` is all below a rollout's OpenAI address; "" for a path that has no stage.
    kind: Kind = ""
    rollout_id: str = ""
    attempt_id: str = ""
    mode: str = ""  # of a call, ``train`` or ``val``
    api: str = ""  # of a call, relative to ``/v1``: ``chat/completions``, ``models``, ``messages/count_tokens``, ...
    content: bytes | None = None  # the body's bytes; None while the body is unread, which the stage `read_body` does
    body: Any = None  # the body's JSON value; None while it is unread, and for an empty one
    # Whose key it has, which the stage `check_key` finds; the operator's where the gateway asks for none.
    asker: Asker = "operator"
    # Of a completion that the stage `aside` answers: one that is not trained, or that only counts its tokens.
    aside: Literal["", "untrained", "count"] = ""

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> Self:
        """Read the path; the body is not read yet."""
        if match := _CALL.fullmatch(scope["path"]):
            return cls(scope, receive).as_call(match[1], match[2], match[3], match[4])
        if match := _ROLLOUTS.fullmatch(scope["path"]):
            rollout_id, attempt_id, events = match[1] or "", match[2] or "", match[3]
            kind = "attempt events" if attempt_id else "events" if events else "rollout" if rollout_id else "rollouts"
            return cls(scope, receive, kind, rollout_id, attempt_id)
        return cls(scope, receive)

    def as_call(self, rollout_id: str, attempt_id: str, mode: str, path: str) -> Self:
        """Return the request as a call of a rollout's; ``path`` is relative to its address."""
        address = {"rollout_id": rollout_id, "attempt_id": attempt_id, "mode": mode}
        return replace(self, kind="call", api=_ADDED.sub("", path), **address)

    @property
    def method(self) -> str:
        return self.scope["method"]

    @property
    def path(self) -> str:
        return self.scope["path"]

    @property
    def headers(self) -> Headers:
        return Headers(scope=self.scope)

    @property
    def is_call(self) -> bool:
        """Return True for a POST below a rollout's OpenAI address."""
        return self.kind == "call" and self.method == "POST"

    @property
    def is_completion(self) -> bool:
        """Return True for a call that is played: of ``chat/completions`` or ``completions``."""
        return self.is_call and self.api in ("chat/completions", "completions")

    def with_body(self, body: Any, api: str | None = None) -> Self:
        """Return the request with another body, and with another API if one is given."""
        return replace(self, body=body, content=dumped(body), api=api or self.api)

    def for_app(self) -> tuple[Scope, Receive]:
        """Return the ASGI scope and ``receive`` by which an app gets this request."""
        scope = self.scope
        if self.kind == "call":
            address = f"/proxy/rollout/{self.rollout_id}/attempt/{self.attempt_id}/mode/{self.mode}"
            path = f"{address}/openai/v1/{self.api}"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if self.content is None:
            return scope, self.receive
        headers = [pair for pair in scope["headers"] if pair[0] not in _BODY_HEADERS]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.content))]
        first: list[Message] = [{"type": "http.request", "body": self.content, "more_body": False}]

        async def receive() -> Message:
            return first.pop() if first else await self.receive()

        return {**scope, "headers": headers}, receive


class Answer(Response):
    """An app's whole answer.

    Args:
        value: the JSON object in it, where that is known.
        call: of a completion, its number among the recorded ones of its attempt.
        prompt: of a completion, the token ids of its prompt, as C ints; None if the server has told none.
    """

    def __init__(
        self,
        content: bytes | str,
        status_code: int = 200,
        *,
        value: Body | None = None,
        call: int = 0,
        prompt: array | None = None,
    ) -> None:
        super().__init__(content, status_code, media_type="application/json")
        self._value = value
        self.call, self.prompt = call, prompt

    @classmethod
    def of(cls, value: Body) -> Self:
        return cls(dumped(value), value=value)

    @cached_property
    def value(self) -> Body | None:
        """Return the JSON object in it; None if it is none, or has NaN or half of a surrogate pair in it."""
        if self._value is not None:
            return self._value
        try:
            value = orjson.loads(self.body)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


Next = Callable[[Request], Awaitable[Response]]


class Stage(Protocol):
    """A stop on a request's way: it answers, or asks the next stage, and may change request and answer."""

    async def __call__(self, request: Request, forward: Next) -> Response:
        """Return the answer to a request."""
        ...


def parse(content: bytes) -> Any:
    """Return the value of a request's body; a ValueError as `loaded` raises it."""
    try:
        return loaded(content)
    except ValueError as error:
        raise ValueError(f"the request's body is not JSON that can be used: {error}") from None


def refusal(status: int, problem: str) -> JSONResponse:
    """Return an error in agent-lightning's form; the stage `error_forms` tells those of calls as their API does."""
    return JSONResponse({"detail": problem}, status)


async def unless_hung_up(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """Return an answer, or cancel the making of it where the client hangs up meanwhile."""
    task, hung_up = asyncio.current_task(), asyncio.create_task(_hung_up(request.receive))
    assert task is not None
    waiting = True
    hung_up.add_done_callback(lambda _: waiting and task.cancel())
    try:
        return await answering
    except asyncio.CancelledError:
        if not hung_up.done() or task.uncancel():
            raise
        log.info("Agent disconnected; cancelling model request", rollout_id=request.rollout_id)
        return Answer(b"", 499)
    finally:
        waiting = False
        hung_up.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
