"""Anthropic's ``/v1/messages/count_tokens``: how long the policy's prompt would be, without tips."""

import re

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.dialects.anthropic_messages import AnthropicCall
from empo2.recipe.gateway.stages.guard import check_call, parse, refusal
from empo2.recipe.gateway.tokens.rendering import rendered

_COUNT = re.compile(r"/proxy/rollout/([^/]+)/attempt/[^/]+/mode/[^/]+/openai/v1/(?:v1/)?messages/count_tokens")


class TokenCounter:
    """ASGI middleware that asks the policy's server to render the chat, and leaves no trace of it.

    Expects requests that `RequestGuard` has let through.
    """

    def __init__(self, app: ASGIApp, servers: upstream.ModelServers) -> None:
        self._app = app
        self._servers = servers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _COUNT.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if match is None:
            return await self._app(scope, receive, send)
        response = await self._answer(match[1], (await receive())["body"])
        await response(scope, receive, send)

    async def _answer(self, rollout_id: str, raw: bytes) -> Response:
        if not upstream.exists(rollout_id):
            return _refused(404, f"Rollout not found: {rollout_id}")
        try:
            call = AnthropicCall(parse(raw), {})  # a thread is not known here
            check_call(call.body, chat=True)
        except ValueError as error:
            return _refused(400, str(error))
        except (LookupError, TypeError, AttributeError):  # lists in the place of objects, and the like
            return _refused(400, "the request is not one of /messages/count_tokens; see its reference")
        try:
            ids = await rendered(self._servers, rollout_id, call.body)
        except upstream.NoServersError as error:
            return _refused(503, str(error))
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 400:
                return AnthropicCall.refusal(400, error.response.content)
            return _refused(502, f"the model server answers {error.response.status_code} to /tokenize")
        except httpx.HTTPError as error:
            return _refused(502, f"the model server does not answer: {type(error).__name__}")
        return JSONResponse({"input_tokens": len(ids)})


def _refused(status: int, problem: str) -> Response:
    return AnthropicCall.refusal(status, bytes(refusal(status, problem, call=True).body))
