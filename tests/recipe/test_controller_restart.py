"""The real controller is killed while agents play: it is started again, and the rest is played."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.launcher.commands import controller_command
from empo2.recipe.launcher.processes import Processes

from ..processes import mark
from .harness import AGENT_KEY, GatewayUnderTest, until

__all__ = ["mark"]


async def test_what_a_killed_controller_had_not_begun_is_played(
    gateway: GatewayUnderTest, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("empo2.recipe.launcher.processes._STEADY_SECONDS", 0)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    processes = Processes(tmp_path, {**os.environ, "EMPO2_TEST_MARK": mark, "PYTHONPATH": path})
    settings = load_settings("cpu", ["agent.concurrency=1"])
    command = controller_command(settings, str(gateway.client.base_url).rstrip("/"))
    local = {"agent_class": "toy_agent:ToyAgent", "env_map": {"TOY_DOOR": "3", "TOY_TROUBLE": "input.trouble"}}
    config = {"timeout_seconds": 300, "local": local}
    body = [{"input": {"trouble": trouble}, "config": config} for trouble in ("hang", "none")]
    first, second = [one["rollout_id"] for one in (await gateway.client.post("/api/rollouts", json=body)).json()]

    async def state(rollout: str) -> str:
        return (await gateway.client.get(f"/api/rollouts/{rollout}")).json()["rollout"]["status"]["state"]

    try:
        processes.start("controller", command, secrets={"EMPO2_KEY": AGENT_KEY}, restartable=True)
        await until(gateway.model.requests, 60)  # the first agent has had its answer and hangs
        (controller,) = psutil.Process(processes.pid("controller")).children()  # of its guard
        controller.kill()
        said: list[str] = []
        await until(lambda: said.extend(processes.check()) or said, 30)
        assert said == ["controller was ended by SIGKILL and was started again"]
        async with asyncio.timeout(60):
            while await state(second) not in ("succeeded", "failed"):
                await asyncio.sleep(0.1)
        assert (await state(first), await state(second)) == ("failed", "succeeded")
        assert len(await gateway.events(second, "reward")) == 1
    finally:
        processes.stop()
