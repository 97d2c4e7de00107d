"""No state is given up because the embedder is slow: the trainer waits for it, and says so when it stands still."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from empo2.recipe import protocol
from empo2.recipe.errors import GatewayError
from empo2.recipe.trainer import gateway_client
from empo2.recipe.trainer.gateway_client import GatewayClient

from .harness import KEY, ROOMS, GatewayUnderTest, Words, running_gateway, turns

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


class SlowWords(Words):
    """Needs a while for each text, as MiniLM does on one core."""

    seconds = 0.02

    def embed(self, texts: Any) -> np.ndarray:
        time.sleep(self.seconds * len(texts))
        return super().embed(texts)


async def test_every_visit_of_many_agents_is_counted_however_long_the_embedder_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """20 agents send 100 states, which take two seconds, while a request to settle takes a tenth of one."""
    monkeypatch.setattr(protocol, "SETTLE_SECONDS", 0.1)
    async with running_gateway(tmp_path, "reflection.timeout=0.5", words=SlowWords()) as gateway:
        rollouts = [await gateway.create("no-memory") for _ in range(20)]
        bodies = [turns(*(f"room {agent} {turn}" for turn in range(5))) for agent in range(20)]

        async def play(rollout: str, episode: list[Any]) -> None:
            for body in episode:
                assert (await gateway.call(rollout, body)).status_code == 200
            await gateway.finish(rollout)

        await asyncio.gather(*map(play, rollouts, bodies))
        client = GatewayClient(str(gateway.client.base_url), KEY)
        begin = time.monotonic()
        metrics = await asyncio.to_thread(client.drain, 60.0)
        assert time.monotonic() - begin > 0.5  # so that something was waited for
        client.close()
        calls = [call for rollout in rollouts for call in await gateway.events(rollout, "empo2_call")]
        assert [call["intrinsic_reward"] for call in calls] == [1.0] * 100
        assert (metrics["empo2/memory_failures"], metrics["empo2/reflections_failed"]) == (0, 0)
        assert metrics["empo2/tips_written"] > 0


async def test_a_call_is_settled_when_its_event_is_recorded(gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch):
    rollout, other = await gateway.create("no-memory"), await gateway.create("no-memory")
    gateway.words.gate.clear()
    await gateway.call(rollout, ROOMS[0])
    monkeypatch.setattr(protocol, "SETTLE_SECONDS", 0.01)
    for asked, late in ((rollout, 1), (other, 0), ("none", 0)):
        answer = await gateway.client.post(protocol.settle_route(asked))
        assert answer.json() == {"late": late, "of_all": 1}
    assert (await gateway.client.post(protocol.SETTLE)).json() == {"late": 1, "of_all": 1}
    monkeypatch.setattr(protocol, "SETTLE_SECONDS", 60.0)
    settled = asyncio.create_task(gateway.client.post(protocol.settle_route(rollout)))
    await asyncio.sleep(0.2)
    assert not settled.done()
    gateway.words.gate.set()
    assert (await settled).json() == {"late": 0, "of_all": 0}
    assert len(await gateway.events(rollout, "empo2_call")) == 1


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
