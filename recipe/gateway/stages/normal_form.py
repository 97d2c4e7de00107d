"""Bring each completion into its normal form, whoever sends it."""

from starlette.responses import Response

from empo2.recipe.gateway.normal_form import normal
from empo2.recipe.gateway.request import Next, Request


class NormalForm:
    """Stand behind the dialects: all later stages see the normal form alone."""

    async def __call__(self, request: Request, forward: Next) -> Response:
        if request.is_completion and (form := normal(request.body)) != request.body:
            request = request.with_body(form)
        return await forward(request)
