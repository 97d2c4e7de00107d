"""The local controller plays as many agents at once as it has room for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agentlightning.server.app import create_app
from omegaconf import OmegaConf

from empo2.recipe.controller.run import OwnKeys

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


@asynccontextmanager
async def reconciling(most: int) -> AsyncIterator[tuple[httpx.AsyncClient, OwnKeys]]:
    """agent-lightning's server, and a reconciler of so many agents, which are processes that never end."""
    proxy = {"model_name": "m", "train": {"temperature": 1}, "val": {"temperature": 0}}
    app = create_app({"key": "", "default_proxy": proxy})
    settings = {
        "runner_type": "local",
        "local_runner": {"maximum_size": most, "poll_interval": 0.2},
        "agl_server": {"url": "http://x", "key": ""},
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as api:
        reconciler = OwnKeys(api, OmegaConf.create(settings))

        async def spawn(rollout: Any) -> bool:
            proc: Any = SimpleNamespace(proc=SimpleNamespace(returncode=None), attempt_id="0", spawned_at=1e18)
            reconciler._rid_to_proc[rollout.rollout_id] = proc
            return True

        reconciler._spawn_for = spawn  # type: ignore[method-assign]
        yield api, reconciler


async def test_agents_whose_rollout_is_over_lose_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone, as with a gateway that was started again, or ended by the agent itself, which then does not end."""
    monkeypatch.setattr("empo2.recipe.controller.run._LEAVE_SECONDS", 0.2)
    async with reconciling(3) as (api, reconciler):
        ids = [f"{number:032x}" for number in range(3)]
        await api.post("/api/rollouts", json=[{"input": {}, "rollout_id": each} for each in ids])
        killed: list[str] = []

        async def kill(rollout: str, item: Any) -> bool:
            killed.append(rollout)
            item.proc.returncode = -9
            return True

        monkeypatch.setattr(reconciler, "_kill_process_group", kill)
        await reconciler._reconcile_once()
        await reconciler._reconcile_once()
        await api.delete(f"/api/rollouts/{ids[0]}")
        await api.patch(f"/api/rollouts/{ids[1]}", json={"status": {"state": "succeeded"}})
        await reconciler._reconcile_once()
        assert killed == []  # it is given time
        await asyncio.sleep(0.3)
        await reconciler._reconcile_once()
        await reconciler._reconcile_once()
    assert sorted(killed) == ids[:2]


async def test_128_agents_play_at_once() -> None:
    """agent-lightning's own reconciler lists 50 rollouts, those that run among them: 50 of 128 would play."""
    async with reconciling(128) as (api, reconciler):
        await api.post("/api/rollouts", json=[{"input": {}, "rollout_id": f"{number:032x}"} for number in range(200)])
        for _ in range(5):
            await reconciler._reconcile_once()
    assert [*reconciler._rid_to_proc] == [f"{number:032x}" for number in range(128)]
