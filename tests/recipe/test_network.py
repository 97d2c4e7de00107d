"""Connections to model servers: calls are spread over small pools, and no limit lets one wait for another."""

from collections import Counter

import httpx
import pytest

from empo2.recipe.errors import ConfigError
from empo2.recipe.gateway.server_client import Network
from empo2.recipe.network import bind


async def test_calls_are_spread_evenly_over_pools_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, closed = Counter[int](), set[int]()

    class Pool(httpx.AsyncBaseTransport):
        def __init__(self, *, limits: httpx.Limits, **_: object) -> None:
            assert limits.max_connections is None
            assert limits.keepalive_expiry and limits.keepalive_expiry < 4  # vLLM closes after 5 seconds, maybe late

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            calls[id(self)] += 1
            return httpx.Response(200)

        async def aclose(self) -> None:
            closed.add(id(self))

    monkeypatch.setattr(httpx, "AsyncHTTPTransport", Pool)
    async with httpx.AsyncClient(transport=Network()) as client:
        for _ in range(256):
            await client.get("http://model")
    assert set(calls.values()) == {256 / len(calls)} and len(calls) >= 16
    assert closed == set(calls)


def test_an_address_of_another_machine_is_no_port_that_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"gateway.host='192.0.2.1': .*; give an address of this machine"):
        bind("192.0.2.1", 0)  # of documentation alone (RFC 5737)
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"gateway.port={port} on 127.0.0.1: .*; 0 takes a free one"):
            bind("127.0.0.1", port)
