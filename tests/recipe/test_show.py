"""Rollouts of the real gateway, controller and manager, read with `empo2 show`."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from empo2.recipe.cli.verbs import run
from empo2.recipe.config import load_settings
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.rollout_log import read_rollouts, write_rollouts
from empo2.recipe.trainer.manager import Empo2RolloutManager
from empo2.recipe.trainer.shown_rollouts import call_rows

from .harness import KEY, MODEL, GatewayUnderTest, controller


async def test_what_was_played_can_be_read(
    gateway: GatewayUnderTest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group of two that see a tip, and one of two whose agents fail after their first call."""
    overrides = ["agent.class=toy_agent:ToyAgent", "memory.scope=[door]", "algorithm.memory_probability=1"]
    settings = load_settings("cpu", [*overrides, "algorithm.baseline=group", "algorithm.off_policy_probability=0"])
    first = {"messages": [{"role": "user", "content": "One of 10 doors hides a lamp. Say a number."}]}
    await gateway.store_tips([first], "Behind door 3.", scope='{"door": 3}')
    url = str(gateway.client.base_url).rstrip("/")
    asked = GatewayClient(url, KEY)
    manager = Empo2RolloutManager(
        settings=settings,
        gateway=asked,
        train_rollout_n=2,
        step=4,
        agl_base_url=url,
        agl_key=KEY,
        model=MODEL,
        local_agent_class="toy_agent:ToyAgent",
        local_env_map={"TOY_DOOR": "input.door", "TOY_TROUBLE": "input.trouble"},
        poll_interval_seconds=0.1,
    )
    with controller(settings, url, tmp_path), closing(manager.client), closing(asked):
        tasks = [{"door": 3, "trouble": "none"}, {"door": 3, "trouble": "raise"}]
        await asyncio.to_thread(manager.play, tasks, is_train=True)
    advantages = dict.fromkeys(manager.results.kept, 0.5)
    folder = tmp_path / "rollouts"
    memory = gateway.folder / "memory.sqlite"
    write_rollouts(folder, call_rows(manager.played, manager.results, 4, "training", advantages, memory), "all")
    capsys.readouterr()

    found = sorted(read_rollouts(folder), key=lambda each: each.dropped or "")  # they are in the order of their ends
    good, bad = found[:2], found[2:]
    assert {(each.mode, each.turns, each.tips, each.dropped) for each in good} == {("memory, on-policy", 3, 1, None)}
    assert [(each.dropped, each.turns, each.return_) for each in bad] == [("failed_by_agent", 1, None)] * 2

    def shown(*arguments: str) -> str:
        assert run(["show", str(tmp_path), *arguments]) == (0, "")
        return capsys.readouterr().out

    agent = (Path(__file__).parent / "toy_agent.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(agent, 1) if "raise RuntimeError" in text]
    cause = f"RuntimeError: the doors are stuck (toy_agent.py:{line} in run)"
    assert f"dropped  2 of step 4, failed by agent: {cause}" in shown()
    said = shown(good[0].id)
    assert said.count("One of 10 doors hides a lamp") == 1 and said.count("- Behind door 3.") == 1
    assert said.count("you see nothing") == 2  # what follows the third reply was never sent
    assert any(f"written from it: {gateway.tip}" in shown(each.id) for each in good)
    assert 'raise RuntimeError("the doors are stuck")' in shown(bad[0].id)
