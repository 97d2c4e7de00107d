"""The gateway's connections to model servers."""

from itertools import cycle

import httpx

_POOLS = 32


class Network(httpx.AsyncBaseTransport):
    """Many small pools of connections in the place of one, without a limit on any.

    A limit would let agents and reflections wait for each other's connections. One pool would look at all of its
    connections for each request (httpcore 1.0, ``AsyncConnectionPool._assign_requests_to_connections``): with 128 calls
    under way a request takes 8 ms of a core, spread over 32 pools 1.3 (docs/performance.md).
    """

    def __init__(self) -> None:
        context, unlimited = httpx.create_ssl_context(), httpx.Limits(max_connections=None)
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=unlimited) for _ in range(_POOLS)]
        self._turns = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()
