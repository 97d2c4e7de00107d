"""Bring each completion into its normal form, whoever sends it."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from empo2.recipe.gateway.normal_form import header_lines, normal
from empo2.recipe.gateway.request import Next, Request

LEFT_OUT = "empo2.left_out"  # in the ASGI scope: `header_lines` of the chat, for `empo2 init`


async def normal_form(arguments: Mapping[str, Any], request: Request, forward: Next) -> Response:
    """Stand behind the dialects: all later stages see the normal form alone.

    Args:
        arguments: of the model's chat template (``model.chat_template_kwargs``), for each chat; what the agent gives
            itself stays. Tip-free prompts and reflections take the arguments of the chat that they belong to.
    """
    form = normal(request.body)
    if arguments and "messages" in form:
        form["chat_template_kwargs"] = {**arguments, **(form.get("chat_template_kwargs") or {})}
    if form != request.body:
        if isinstance(messages := request.body.get("messages"), list):
            request.scope[LEFT_OUT] = header_lines(messages)
        request = request.with_body(form)
    return await forward(request)
