"""Let an agent speak its dialect: behind these stages there are chat completions and completions only.

And its answers have no more in them than it asked for.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.dialects.anthropic_messages import AnthropicCall
from empo2.recipe.gateway.dialects.dialect import Body, error_of, with_headers
from empo2.recipe.gateway.dialects.responses import ResponsesCall
from empo2.recipe.gateway.dialects.streams import StreamedCompletion
from empo2.recipe.gateway.request import Answer, Next, Request, refusal
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.form import check_call

Dialect = AnthropicCall | ResponsesCall | StreamedCompletion

_KEEP_ALIVE_SECONDS = 15  # clients give up after 300 seconds without an event


async def error_forms(request: Request, forward: Next) -> Response:
    """Tell an agent each error in the form of the API that it asked; those of ``gateway.other_server`` pass unchanged.

    Stands before all that may refuse a call.
    """
    answer = await forward(request)
    if request.kind != "call" or answer.status_code < 400 or isinstance(answer, StreamingResponse):
        return answer
    # Clients of Anthropic's ask for models, too.
    anthropic = request.api.partition("/")[0] == "messages" or "anthropic-version" in request.headers
    return with_headers(JSONResponse(error_of(answer, anthropic=anthropic), answer.status_code), answer)


class Dialects:
    """Translate streams, ``/responses`` and ``/messages``, and the answers to them; all else passes unchanged.

    Args:
        max_bytes: most bytes of a translated request, which may be larger than the agent's: a response that continues
            another one has its whole chat.
    """

    def __init__(self, max_bytes: int, services: Services) -> None:
        self._services = services
        self._max_bytes = max_bytes
        self._responses = upstream.PerRollout(dict[str, list[Body]])
        self._threads = upstream.PerRollout(dict[str, Body])

    async def __call__(self, request: Request, forward: Next) -> Response:
        try:
            dialect = self._dialect(request)
            if dialect is not None:
                check_call(dialect.body, dialect.path)
        except ValueError as error:
            return refusal(400, str(error))
        except (LookupError, TypeError, AttributeError):  # lists in the place of objects, and the like
            return refusal(400, f"the request is not one of /{request.api}; see its reference")
        if dialect is None:
            return await forward(request)
        translated = request.with_body(dialect.body, dialect.path)
        if len(translated.content or b"") > self._max_bytes:
            problem = f"the chat has more than gateway.max_request={self._max_bytes / 2**20:.3g} MiB"
            return refusal(413, problem)
        if request.api == "messages/count_tokens":
            return await forward(replace(translated, aside="count"))
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
            return refusal(502, "the model server's answer is no completion")

    def _dialect(self, request: Request) -> Dialect | None:
        """Return a call in its dialect; None for what passes unchanged."""
        match request.api if request.is_call else "":
            case "messages":
                return AnthropicCall(request.body, self._threads[request.rollout_id])
            case "messages/count_tokens":
                return AnthropicCall(request.body, {})  # a thread is not known here
            case "responses":
                return ResponsesCall(request.body, self._responses[request.rollout_id])
            case "chat/completions" | "completions" if request.body.get("stream"):
                return StreamedCompletion(request.api, request.body)
            case _:
                return None


async def as_asked(request: Request, forward: Next) -> Response:
    """Stand behind the dialects: the agent gets token ids and log-probs only if it asked for them itself.

    agent-lightning asks for them in its place, and its event keeps them, for the training rows.
    """
    answer = await forward(request)
    unasked = _unasked(request.body)
    if not (unasked and isinstance(answer, Answer) and answer.status_code == 200 and answer.value is not None):
        return answer
    completion, choices = answer.value, answer.value.get("choices")
    if isinstance(choices, list):
        choices = [_without(unasked, choice) if isinstance(choice, dict) else choice for choice in choices]
        completion = {**completion, "choices": choices}  # a copy: others hold the choices, too
    return Answer.of(_without(unasked, completion))


def _unasked(body: Body) -> set[str]:
    wanted = body.get("logprobs")
    unasked = set() if body.get("return_token_ids") else {"prompt_token_ids", "token_ids"}
    # Of a completion it is a number, and 0 asks for the sampled token's.
    return unasked if wanted or (wanted == 0 and wanted is not False) else {*unasked, "logprobs"}


def _without(names: set[str], value: Mapping[str, Any]) -> Body:
    kept = {name: each for name, each in value.items() if name not in names}
    return kept | ({"logprobs": None} if "logprobs" in names & value.keys() else {})
