"""No state is given up because the embedder is slow: the trainer waits for it, and says so when it stands still."""

import asyncio
from contextlib import closing

import httpx
import pytest

from empo2.recipe import gateway_client, protocol
from empo2.recipe.errors import GatewayError
from empo2.recipe.gateway_client import GatewayClient

from .harness import KEY, ROOMS, GatewayUnderTest


async def test_every_visit_is_counted_however_long_the_embedder_takes(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
):
    rollout, other = await gateway.create("no-memory"), await gateway.create("no-memory")
    gateway.words.gate.clear()
    for body in ROOMS:
        await gateway.call(rollout, body)
    await gateway.finish(rollout)
    monkeypatch.setattr(protocol, "SETTLE_SECONDS", 0.01)
    for asked, late in ((rollout, 3), (other, 0), ("none", 0)):
        answer = await gateway.client.post(protocol.settle_route(asked))
        assert answer.json() == {"late": late, "of_all": 3}
    assert (await gateway.client.post(protocol.SETTLE)).json() == {"late": 3, "of_all": 3}
    with closing(GatewayClient(str(gateway.client.base_url), KEY)) as client:
        drained = asyncio.create_task(asyncio.to_thread(client.drain, 60.0))
        await asyncio.sleep(0.5)
        assert not drained.done()
        monkeypatch.setattr(protocol, "SETTLE_SECONDS", 60.0)
        gateway.words.gate.set()
        metrics = await drained
    assert [call["intrinsic_reward"] for call in await gateway.events(rollout, "empo2_call")] == [1.0] * 3
    assert (metrics["empo2/memory_failures"], metrics["empo2/tips_written"]) == (0, 1)


def test_the_trainer_waits_while_any_state_gets_on_and_ends_when_none_does(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(gateway_client, "monotonic", lambda: now[0])
    answers = [(2, 9), (2, 8), (2, 8), (2, 7), (0, 3)]

    def answer(request: httpx.Request) -> httpx.Response:
        now[0] += 200.0
        late, of_all = answers.pop(0) if answers else (2, 3)
        return httpx.Response(200, json={"late": late, "of_all": of_all})

    client = GatewayClient("http://gw", KEY, httpx.MockTransport(answer))
    client.settle("r")
    assert (now, answers) == ([1000.0], [])
    with pytest.raises(GatewayError, match=r"embedded none of 3 states for 300 seconds; .*memory\.embedder_device"):
        client.settle("r")
