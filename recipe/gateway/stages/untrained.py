"""Tell the calls that are not trained (``gateway.trained_calls``), and pass them to another server if there is one."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import httpx
from starlette.responses import Response, StreamingResponse

from empo2.recipe.config import CallRule, imported
from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.request import Next, Request, refusal, unless_hung_up
from empo2.recipe.gateway.services import Services

# Path relative to /v1, headers (names in lower case), body -> whether the call is trained.
Choice = Callable[[str, Mapping[str, str], dict[str, Any]], bool]

_TRAINABLE = ("chat/completions", "completions", "responses", "messages")
# Not passed on: the agents' key, and what belongs to the connection.
_OWN_HEADERS = ("authorization", "x-api-key", "api-key", "host", "content-length", "connection", "transfer-encoding")
_ANSWER_HEADERS = ("content-type", "retry-after")


async def untrained_calls(
    services: Services, trained: Choice | None, client: httpx.AsyncClient, request: Request, forward: Next
) -> Response:
    """Pass untrained calls to ``gateway.other_server``, or set them aside; only the other has ``/embeddings``.

    A call of a rollout that was deleted is refused, whoever would answer it.

    Args:
        trained: the choice of ``gateway.trained_calls`` (`choice_of`).
        client: of the other server.
    """
    if not request.is_call:
        return await forward(request)
    if upstream.rollout_of(request.rollout_id) is None:
        return refusal(404, f"Rollout not found: {request.rollout_id}")
    if request.api != "embeddings":
        if trained is None or request.api not in _TRAINABLE:
            return await forward(request)
        try:
            if trained(request.api, request.headers, request.body):
                return await forward(request)
        except Exception as error:  # of the user's function: neither answer would be right
            return refusal(500, f"gateway.trained_calls failed: {type(error).__name__}: {error}")
        services.metrics.counts["untrained_calls"] += 1
    if (server := services.settings.gateway.other_server) is not None:
        return await unless_hung_up(request, _passed(services, server, client, request))
    if request.api == "embeddings":
        return refusal(400, "the policy has no /embeddings: name a server that does with gateway.other_server")
    return await forward(replace(request, aside="untrained"))


async def _passed(services: Services, server: str, client: httpx.AsyncClient, request: Request) -> Response:
    span = services.traces.current()
    span.asked(request.body)
    span.set({names.TRAINED: False})
    headers = {name: value for name, value in request.headers.items() if name not in _OWN_HEADERS}
    headers["accept-encoding"] = "identity"
    if key := os.environ.get("OPENAI_API_KEY"):
        headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
    headers |= services.traces.headers()
    url = f"{server.rstrip('/')}/{request.api}"
    sent = client.build_request("POST", url, content=request.content, headers=headers)
    try:
        answer = await client.send(sent, stream=True)
    except httpx.HTTPError as error:
        return refusal(502, f"the server of calls that are not trained: {type(error).__name__}")
    kept = {name: value for name, value in answer.headers.items() if name.lower() in _ANSWER_HEADERS}

    async def body():
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        finally:
            await answer.aclose()

    return StreamingResponse(body(), answer.status_code, kept)


def choice_of(rules: Sequence[CallRule] | str) -> Choice | None:
    """Return the function that tells whether a call is trained, as one of the rules must; None if all are.

    Raises:
        ConfigError: the function cannot be imported.
    """
    if isinstance(rules, str):
        return imported(rules, "gateway.trained_calls")
    return (lambda path, headers, body: any(_fits(rule, path, headers, body) for rule in rules)) if rules else None


def _fits(rule: CallRule, path: str, headers: Mapping[str, str], body: dict[str, Any]) -> bool:
    if rule.path is not None and not fnmatchcase(path, rule.path.strip("/")):
        return False
    if rule.model is not None and not fnmatchcase(str(body.get("model", "")), rule.model):
        return False
    if rule.header is not None:
        name, _, value = rule.header.partition(":")
        found = headers.get(name.strip().lower())
        return found is not None and fnmatchcase(found, value.strip() or "*")
    return True
