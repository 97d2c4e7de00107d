"""Calls that are not the policy's to learn from: they pass to the server that answers them, and leave no trace."""

import contextlib
import os
import re
from collections import Counter

import httpx
from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from empo2.recipe.gateway.stages.gate import PolicyGate
from empo2.recipe.gateway.stages.guard import parse, refusal, replayed
from empo2.recipe.gateway.stages.trained_calls import Choice
from empo2.recipe.gateway.upstream import ModelServers, NoServersError

_CALL = re.compile(r"/proxy/rollout/([^/]+)/attempt/[^/]+/mode/[^/]+/openai/v1/(?:v1/)?(.+)")
CHOSEN = ("chat/completions", "completions", "responses", "messages")
# Not passed on: the agents' key, and what belongs to the connection.
_OWN_HEADERS = ("authorization", "x-api-key", "host", "content-length", "connection", "transfer-encoding")
_ANSWER_HEADERS = ("content-type", "retry-after")


class OtherCalls:
    """ASGI middleware; expects requests that `RequestGuard` has let through.

    Args:
        trained: tells which calls pass to the app; None for all.
        servers: the policy's, which answer the others if there is no other server.
        gate: before the policy's servers.
        other: address of that server (``gateway.other_server``); it alone answers ``/embeddings``.
        client: for the other server.
        counts: ``untrained_calls`` is counted.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        trained: Choice | None,
        servers: ModelServers,
        gate: PolicyGate,
        other: str | None,
        client: httpx.AsyncClient,
        counts: Counter[str],
    ) -> None:
        self._app = app
        self._trained = trained
        self._servers = servers
        self._gate = gate if other is None else contextlib.nullcontext()
        self._other = other
        self._client = client
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _CALL.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        chosen = () if self._trained is None else CHOSEN
        if match is None or match[2] not in (*chosen, "embeddings"):
            return await self._app(scope, receive, send)
        rollout_id, path = match[1], match[2]
        raw, rest = (await receive())["body"], receive
        headers = dict(Headers(scope=scope))
        if self._trained is not None and path != "embeddings":
            try:
                if self._trained(path, headers, parse(raw)):
                    return await self._app(scope, replayed(raw, rest), send)
            except Exception as error:  # of the user's function: neither answer would be right
                problem = f"gateway.trained_calls failed: {type(error).__name__}: {error}"
                return await refusal(500, problem, call=True)(scope, rest, send)
            self._counts["untrained_calls"] += 1
        async with self._gate:
            response = await self._answer(rollout_id, path, headers, raw)
            await response(scope, rest, send)

    async def _answer(self, rollout_id: str, path: str, headers: dict[str, str], raw: bytes) -> Response:
        headers = {name: value for name, value in headers.items() if name not in _OWN_HEADERS}
        headers["accept-encoding"] = "identity"
        try:
            if self._other is not None:
                if key := os.environ.get("OPENAI_API_KEY"):
                    headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
                url = f"{self._other.rstrip('/')}/{path}"
                request = self._client.build_request("POST", url, content=raw, headers=headers)
                answer = await self._client.send(request, stream=True)
            elif path == "embeddings":
                problem = "the policy has no /embeddings: name a server that does with gateway.other_server"
                return refusal(400, problem, call=True)
            else:
                answer = await self._servers.stream(rollout_id, f"/{path}", parse(raw), headers)
        except NoServersError as error:
            return refusal(503, str(error), call=True)
        except httpx.HTTPError as error:
            return refusal(502, f"the server of calls that are not trained: {type(error).__name__}", call=True)
        kept = {name: value for name, value in answer.headers.items() if name.lower() in _ANSWER_HEADERS}

        async def body():
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()

        return StreamingResponse(body(), answer.status_code, kept)
