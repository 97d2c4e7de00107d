"""Bring each completion into its normal form, whoever sends it."""

from starlette.responses import Response

from empo2.recipe.gateway.normal_form import header_lines, normal
from empo2.recipe.gateway.request import Next, Request

LEFT_OUT = "empo2.left_out"  # in the ASGI scope: `header_lines` of the chat, for `empo2 init`


class NormalForm:
    """Stand behind the dialects: all later stages see the normal form alone."""

    async def __call__(self, request: Request, forward: Next) -> Response:
        if request.is_completion and (form := normal(request.body)) != request.body:
            if isinstance(messages := request.body.get("messages"), list):
                request.scope[LEFT_OUT] = header_lines(messages)
            request = request.with_body(form)
        return await forward(request)
