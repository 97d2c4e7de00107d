"""The gate before the policy's servers, closed while the trainer changes their weights."""

import asyncio
import contextlib

from starlette.responses import Response

from empo2.recipe.gateway.request import Next, Request


class PolicyGate:
    """``async with gate`` waits until the gate is open; what is inside the block is under way until it is left.

    agent-lightning's own pause answers calls with status 429, which an agent's client takes for an error after a few
    attempts. Calls that wait here are merely late.
    """

    def __init__(self) -> None:
        self._opened, self._idle = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._idle.set()
        self._under_way = 0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def __aenter__(self) -> None:
        while not self._opened.is_set():  # it may have been closed again before this task got its turn
            await self._opened.wait()
        self._under_way += 1
        self._idle.clear()

    async def __aexit__(self, *_: object) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def close(self, timeout: float) -> tuple[int, int]:
        """Let nothing more in, and wait at most ``timeout`` seconds for what is under way.

        Returns:
            How much was under way before, and how much still is.
        """
        self._opened.clear()
        before = self._under_way
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return before, self._under_way

    def open(self) -> None:
        self._opened.set()

    async def hold(self, request: Request, forward: Next) -> Response:
        """As a stage of a completion's way: let it through while the gate is open."""
        async with self:
            return await forward(request)
