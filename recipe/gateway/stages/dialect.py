"""Let an agent speak its dialect: behind this stage there are chat completions and completions only."""

import httpx
from starlette.responses import JSONResponse, Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.dialects.anthropic_messages import AnthropicCall
from empo2.recipe.gateway.dialects.dialect import Body, with_headers
from empo2.recipe.gateway.dialects.responses import ResponsesCall
from empo2.recipe.gateway.dialects.streams import StreamedCompletion
from empo2.recipe.gateway.request import Answer, Next, Request, refusal
from empo2.recipe.gateway.stages.form import check_call
from empo2.recipe.gateway.tokens.rendering import rendered

_COUNT = "messages/count_tokens"  # of Anthropic's


class Dialects:
    """Translate streams, ``/responses`` and ``/messages``, and the answers to them; all else passes unchanged.

    Args:
        max_bytes: most bytes of a translated request, which may be larger than the agent's: a response that continues
            another one has its whole chat.
    """

    def __init__(self, max_bytes: int, servers: upstream.ModelServers) -> None:
        self._servers = servers
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
            return JSONResponse({"input_tokens": len(await rendered(self._servers, rollout_id, body))})
        except upstream.NoServersError as error:
            return refusal(503, str(error), call=True)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 400:
                return Response(error.response.content, 400)
            return refusal(502, f"the model server answers {error.response.status_code} to /tokenize", call=True)
        except httpx.HTTPError as error:
            return refusal(502, f"the model server does not answer: {type(error).__name__}", call=True)

    def _dialect(self, request: Request) -> AnthropicCall | ResponsesCall | StreamedCompletion:
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
