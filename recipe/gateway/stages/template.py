"""Give every chat the same arguments of the model's chat template."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from empo2.recipe.gateway.request import Next, Request


class TemplateArguments:
    """Put ``model.chat_template_kwargs`` into each chat; what the agent gives itself stays.

    Tip-free prompts and reflections take the arguments of the chat that they belong to.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments

    async def __call__(self, request: Request, forward: Next) -> Response:
        if not (self._arguments and request.is_completion and "messages" in request.body):
            return await forward(request)
        arguments = {**self._arguments, **(request.body.get("chat_template_kwargs") or {})}
        return await forward(request.with_body({**request.body, "chat_template_kwargs": arguments}))
