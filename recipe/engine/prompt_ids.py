"""vLLM 0.20.2 with ``prompt_token_ids`` in chat completions: the model reads these ids, the rest is as for any chat.

``/v1/completions`` takes ids, but parses no tool calls, and ``/inference/v1/generate`` answers with ids alone. Here the
chat is rendered as always, for the tool parser, the reasoning parser and the grammar, and then its ids are replaced.
Named by vLLM's ``--middleware``, which is imported in the process of its API server, and in no other.
"""

from typing import Any

from starlette.types import ASGIApp
from vllm.entrypoints.serve.render.serving import OpenAIServingRender

from empo2.recipe.engine.model_key import KeyCheck

FIELD = "prompt_token_ids"


class PromptTokenIds(KeyCheck):
    """The check of the key; vLLM makes it before it answers the first request. verl passes one middleware on."""

    def __init__(self, app: ASGIApp) -> None:
        accept_prompt_ids()
        super().__init__(app)


def accept_prompt_ids() -> None:
    """Replace ``OpenAIServingRender.preprocess_chat``, which renders the chat of a request. Idempotent."""
    render = OpenAIServingRender.preprocess_chat
    if hasattr(render, "__wrapped__"):
        return

    async def preprocess_chat(self: OpenAIServingRender, request: Any, *args: Any, **options: Any) -> Any:
        conversation, prompts = await render(self, request, *args, **options)
        ids = (getattr(request, "model_extra", None) or {}).get(FIELD)
        if ids is not None:
            prompts = await self.preprocess_cmpl(request, [ids])  # checks their number as for any prompt
        return conversation, prompts

    preprocess_chat.__wrapped__ = render  # type: ignore[attr-defined]
    OpenAIServingRender.preprocess_chat = preprocess_chat  # type: ignore[method-assign]
