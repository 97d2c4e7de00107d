"""Ask the policy's server how it renders and tokenizes a request."""

from array import array
from typing import Any

import orjson

from empo2.recipe.gateway.upstream import ModelServers

# The fields of a chat completion that decide how vLLM renders its prompt (vLLM 0.20 TokenizeChatRequest).
_RENDERING = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "prompt",
)
# These decide it too, but TokenizeChatRequest accepts them only as arguments of the template.
TEMPLATE_ARGUMENTS = ("documents", "reasoning_effort")
_SECONDS = 60


async def rendered(servers: ModelServers, rollout_id: str, body: dict[str, Any]) -> array:
    """Return the prompt ids of a request, as C ints: thousands of prompts are held at once.

    Raises:
        NoServersError: no server is registered.
        httpx.HTTPError: it refuses, or does not answer within a minute.
    """
    request = {name: body[name] for name in _RENDERING if name in body}
    if arguments := {name: body[name] for name in TEMPLATE_ARGUMENTS if body.get(name) is not None}:
        request["chat_template_kwargs"] = (body.get("chat_template_kwargs") or {}) | arguments
    response = await servers.post(rollout_id, "/tokenize", request, timeout=_SECONDS)
    response.raise_for_status()
    return array("i", orjson.loads(response.content)["tokens"])


def rendering_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat completion, other than its messages, that decide how it is rendered."""
    return {name: body[name] for name in (*_RENDERING, *TEMPLATE_ARGUMENTS) if name in body and name != "messages"}
