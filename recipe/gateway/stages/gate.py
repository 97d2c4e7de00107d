"""Hold completions while the policy's weights change."""

import contextlib

from starlette.responses import Response

from empo2.recipe.gateway.gate import PolicyGate
from empo2.recipe.gateway.request import Next, Request


class Gated:
    """Let completions through the gate."""

    def __init__(self, gate: PolicyGate) -> None:
        self._gate = gate

    async def __call__(self, request: Request, forward: Next) -> Response:
        async with self._gate if request.is_completion else contextlib.nullcontext():
            return await forward(request)
