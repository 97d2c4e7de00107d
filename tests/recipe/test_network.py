"""Connections to model servers: many at once, none waits for another, and each pool has few."""

import asyncio
from collections import Counter

import httpx
import pytest

from empo2.recipe.gateway.upstream import Network


async def test_calls_at_once_are_spread_evenly_and_none_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, closed = Counter[int](), set[int]()
    all_came = asyncio.Event()

    class Pool(httpx.AsyncBaseTransport):
        def __init__(self, *, limits: httpx.Limits, **_: object) -> None:
            assert limits.max_connections is None

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            under_way[id(self)] += 1
            if under_way.total() == 512:
                all_came.set()
            await all_came.wait()
            return httpx.Response(200)

        async def aclose(self) -> None:
            closed.add(id(self))

    monkeypatch.setattr(httpx, "AsyncHTTPTransport", Pool)
    async with httpx.AsyncClient(transport=Network()) as client:
        await asyncio.gather(*(client.get("http://model") for _ in range(512)))
    assert set(under_way.values()) == {512 / len(under_way)} and len(under_way) >= 16
    assert closed == set(under_way)
