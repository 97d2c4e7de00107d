"""Let an agent speak its dialect: behind this stage there are chat completions and completions only."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response, StreamingResponse

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.dialects.anthropic_messages import AnthropicCall
from empo2.recipe.gateway.dialects.dialect import Body, with_headers
from empo2.recipe.gateway.dialects.responses import ResponsesCall
from empo2.recipe.gateway.dialects.streams import StreamedCompletion
from empo2.recipe.gateway.request import Answer, Next, Request, refusal
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.errors import unanswered
from empo2.recipe.gateway.stages.form import check_call
from empo2.recipe.gateway.tokens.rendering import rendered

Dialect = AnthropicCall | ResponsesCall | StreamedCompletion

_KEEP_ALIVE_SECONDS = 15  # clients give up after 300 seconds without an event
_COUNT = "messages/count_tokens"  # of Anthropic's


class Dialects:
    """Translate streams, ``/responses`` and ``/messages``, and the answers to them; all else passes unchanged.

    Args:
        max_bytes: most bytes of a translated request, which may be larger than the agent's: a response that continues
            another one has its whole chat.
    """

    def __init__(self, max_bytes: int, services: Services) -> None:
        self._services = services
        self._max_bytes = max_bytes
        self._held: dict[str, tuple[dict[str, list[Body]], dict[str, Body]]] = {}  # by rollout: responses, threads

    async def __call__(self, request: Request, forward: Next) -> Response:
        streamed = request.is_completion and request.body.get("stream")
        if not (streamed or (request.is_call and request.api in ("responses", "messages", _COUNT))):
            return await forward(request)
        try:
            dialect = self._dialect(request)
            if dialect.path == "chat/completions":
                check_call(dialect.body, chat=True)
        except ValueError as error:
            return refusal(400, str(error), call=True)
        except (LookupError, TypeError, AttributeError):  # lists in the place of objects, and the like
            return refusal(400, f"the request is not one of /{request.api}; see its reference", call=True)
        translated = request.with_body(dialect.body, dialect.path)
        if len(translated.content or b"") > self._max_bytes:
            problem = f"the chat has more than gateway.max_request={self._max_bytes / 2**20:.3g} MiB"
            return refusal(413, problem, call=True)
        if request.api == _COUNT:
            return await self._count(request.rollout_id, dialect.body)
        answering = self._answer(dialect, translated, forward)
        return await (self._kept_alive(dialect, answering) if request.body.get("stream") else answering)

    async def _kept_alive(self, dialect: Dialect, answering: Coroutine[Any, Any, Response]) -> Response:
        """Return the answer; where it takes long, a stream that says so until it is there."""
        answer = asyncio.create_task(answering)
        try:
            if (await asyncio.wait([answer], timeout=_KEEP_ALIVE_SECONDS))[0]:
                return answer.result()
        except BaseException:
            answer.cancel()
            raise
        self._services.traces.current().wait_for(answer)

        async def stream() -> AsyncIterator[str | bytes | memoryview]:
            try:
                while not answer.done():
                    yield dialect.waiting()
                    await asyncio.wait([answer], timeout=_KEEP_ALIVE_SECONDS)
                told = answer.result()
                yield told.body if told.status_code == 200 else dialect.failed(told)
            finally:
                answer.cancel()

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _answer(self, dialect: Dialect, translated: Request, forward: Next) -> Response:
        answer = await forward(translated)
        if answer.status_code != 200:
            return answer
        try:
            assert isinstance(answer, Answer)
            return with_headers(dialect.answer(answer.value or {}), answer)
        except (LookupError, TypeError, AttributeError):
            return refusal(502, "the model server's answer is no completion", call=True)

    async def _count(self, rollout_id: str, body: Body) -> Response:
        """Return how long the policy's prompt would be, without tips; the call leaves no trace."""
        if upstream.rollout_of(rollout_id) is None:
            return refusal(404, f"Rollout not found: {rollout_id}", call=True)
        try:
            return JSONResponse({"input_tokens": len(await rendered(self._services.servers, rollout_id, body))})
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 400:
                return Response(error.response.content, 400)
            return refusal(502, f"the model server answers {error.response.status_code} to /tokenize", call=True)
        except (upstream.NoServersError, httpx.HTTPError) as error:
            return unanswered(error)

    def _dialect(self, request: Request) -> Dialect:
        match request.api:
            case "messages":
                return AnthropicCall(request.body, self._held_of(request.rollout_id)[1])
            case "messages/count_tokens":
                return AnthropicCall(request.body, {})  # a thread is not known here
            case "responses":
                return ResponsesCall(request.body, self._held_of(request.rollout_id)[0])
            case _:
                return StreamedCompletion(request.api, request.body)

    def _held_of(self, rollout_id: str) -> tuple[dict[str, list[Body]], dict[str, Body]]:
        if rollout_id not in self._held:
            self._held = {name: held for name, held in self._held.items() if upstream.rollout_of(name)}
        return self._held.setdefault(rollout_id, ({}, {}))
