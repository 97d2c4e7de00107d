"""The local controller plays as many agents at once as it has room for."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agentlightning.server.app import create_app
from omegaconf import OmegaConf

from empo2.recipe.controller.run import OwnKeys

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


async def test_128_agents_play_at_once() -> None:
    """agent-lightning's own reconciler lists 50 rollouts, those that run among them: 50 of 128 would play."""
    proxy = {"model_name": "m", "train": {"temperature": 1}, "val": {"temperature": 0}}
    app = create_app({"key": "", "default_proxy": proxy})
    settings = {
        "runner_type": "local",
        "local_runner": {"maximum_size": 128, "poll_interval": 0.2},
        "agl_server": {"url": "http://x", "key": ""},
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as api:
        await api.post("/api/rollouts", json=[{"input": {}, "rollout_id": f"{number:032x}"} for number in range(200)])
        reconciler = OwnKeys(api, OmegaConf.create(settings))
        started: list[str] = []

        async def spawn(rollout: Any) -> bool:
            proc: Any = SimpleNamespace(proc=SimpleNamespace(returncode=None), attempt_id="0", spawned_at=1e18)
            reconciler._rid_to_proc[rollout.rollout_id] = proc
            started.append(rollout.rollout_id)
            return True

        reconciler._spawn_for = spawn  # type: ignore[method-assign]
        for _ in range(5):
            await reconciler._reconcile_once()
    assert started == [f"{number:032x}" for number in range(128)]
