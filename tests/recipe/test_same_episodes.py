"""An evaluation of a checkpoint plays what the validation of its step played: the same rollouts, the same requests."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from agentlightning.schemas import RolloutCreate

from empo2.recipe.cli.panel_options import PanelOptions
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.evaluation.episode_results import Result
from empo2.recipe.evaluation.player import MEMORY_OFF, MEMORY_ON, Player, planned_episodes
from empo2.recipe.launcher.run_directory import write_settings
from empo2.recipe.protocol import RolloutTag, scope_of
from empo2.recipe.run_folder import CHECKPOINTS, MEMORY_FILE, checkpoint_folder, mark_complete
from empo2.recipe.trainer.gateway_client import GatewayClient
from empo2.recipe.trainer.manager import Empo2RolloutManager
from empo2.recipe.trainer.verl_config import build_verl_config

from .harness import KEY, PATIENT, ROOMS, GatewayUnderTest, controller, is_reflection, running_gateway
from .model_server import MODEL

HERE = Path(__file__).parent
TASKS = [{"door": 3, "trouble": "none"}, {"door": 5, "trouble": "none"}]
SETTINGS = [
    *PATIENT,
    "memory.top_k=10",
    "tasks.source=toy_agent:not_loaded",  # the tasks are those above, not ScienceWorld's
    "agent.class=toy_agent:ToyAgent",
    "agent.env={TOY_DOOR: input.door, TOY_TROUBLE: input.trouble}",
    "agent.time_limit=300",
    "memory.scope=[door]",
    "memory.embedder=words",  # the stand-in of the harness
    "memory.min_similarity=-1",
    "model.val_temperature=0.3",
    "run.validate_with_memory=true",
    "algorithm.success_return=1",
    "algorithm.return_tolerance=0.01",
]


def created(payload: list[dict[str, Any]]) -> list[str]:
    """Rollouts as they were asked for, but for their ids, in an order of their own."""
    found = []
    for request in payload:
        rollout = RolloutCreate.model_validate({**request, "rollout_id": None})
        tag = RolloutTag.read(rollout.metadata)
        found.append(rollout.model_dump(exclude={"metadata"}) | {"tag": tag and tag.model_dump(exclude={"step"})})
    return sorted(json.dumps(each, sort_keys=True, default=str) for each in found)


def validate(settings: Settings, url: str, folder: Path) -> tuple[list[str], dict[tuple[int, bool], float]]:
    """The rollouts and returns, by door and memory, of the trainer's validation."""
    whole = build_verl_config(settings, model_path=MODEL, run_directory=folder, gateway_url=url, gateway_key=KEY)
    config = whole.agentlightning
    gateway = GatewayClient(url, KEY)
    manager = Empo2RolloutManager(
        settings=settings,
        gateway=gateway,
        group_size=2,
        step=1,
        agl_base_url=url,
        agl_key=KEY,
        model=MODEL,
        rollout_timeout_seconds=config.rollout_timeout_seconds,
        local_agent_class=config.local.agent_class,
        local_env_map=dict(config.local.env_map),
        poll_interval_seconds=0.1,
    )
    asked, post = [], manager.client.post_with_retry

    def recorded(path: str, *, json: Any) -> httpx.Response:
        asked.extend(json)
        return post(path, json=json)

    manager.client.post_with_retry = recorded  # pyright: ignore[reportAttributeAccessIssue]
    doors: dict[str, int] = {}
    build = manager._build_completed_rollout

    def remembered(enqueued_rollout: Any, rollout: Any) -> Any:
        doors[enqueued_rollout.rollout_id] = rollout.input["door"]
        return build(enqueued_rollout, rollout)

    manager._build_completed_rollout = remembered
    columns = {name: [task[name] for task in TASKS] for name in TASKS[0]}
    manager.enqueue_and_wait_until_completed(columns, is_train=False)
    manager.client.close()
    gateway.close()
    kept = manager.results.kept.items()
    return created(asked), {(doors[name], each.mode.memory): each.return_ for name, each in kept}


def evaluate(run: Path, url: str) -> tuple[list[str], dict[tuple[int, bool], float | None]]:
    """The same of an evaluation of the run's checkpoint, with memory and without."""
    content = {"description": "", "group": [], "config": {}, "common": {}, "rows": TASKS}
    (run / "panel.json").write_text(json.dumps(content))
    evaluated = PanelOptions(model=str(run), panel=str(run / "panel.json")).read("eval", remembers=True)
    asked: list[dict[str, Any]] = []

    def note(sent: httpx.Request) -> None:
        if (sent.method, sent.url.path) == ("POST", "/api/rollouts"):
            asked.extend(json.loads(sent.content))

    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60, event_hooks={"request": [note]}) as client:
        planned = planned_episodes(evaluated.panel, [MEMORY_OFF, MEMORY_ON], samples=1)
        found: list[Result] = list(Player(client, evaluated.settings, lambda: None).play(planned))
    return created(asked), {(TASKS[each.index]["door"], each.part == MEMORY_ON): each.return_ for each in found}


def checkpoint_of(gateway: GatewayUnderTest, settings: Settings, run: Path) -> None:
    """A run's folder with settings and a checkpoint, whose weights nobody reads."""
    folder = checkpoint_folder(run / CHECKPOINTS, 1)
    folder.mkdir(parents=True)
    write_settings(settings, run)
    (folder / MEMORY_FILE).write_bytes((gateway.folder / "snapshot.sqlite").read_bytes())
    mark_complete(folder)


@pytest.mark.timeout(600)
async def test_evaluation_and_validation_play_the_same(
    quiet: None, empty_stores: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    settings, run = load_settings("cpu", SETTINGS), tmp_path / "runs" / "r"
    async with running_gateway(tmp_path, *SETTINGS) as gateway:
        tip = "The lamp is behind door 5."
        for task in TASKS:
            await gateway.store_tips(ROOMS, tip, scope=scope_of(task, settings.memory.scope))
        run.mkdir(parents=True)
        await gateway.snapshot()
        checkpoint_of(gateway, settings, run)
        gateway.model.reply = lambda body: tip if is_reflection(body) else ("5" if tip in str(body) else "3")
        url = str(gateway.client.base_url)
        before = await gateway.snapshot()
        with controller(settings, url, tmp_path):
            start = len(gateway.model.seen)
            validated, returns = await asyncio.to_thread(validate, settings, url, tmp_path)
            between = len(gateway.model.seen)
            evaluated, others = await asyncio.to_thread(evaluate, run, url)
        after = await gateway.snapshot()
    assert validated == evaluated
    assert len(validated) == 4
    # Without tips all say 3, with them 5.
    assert returns == others == {(3, False): 1.0, (5, False): 0.8, (3, True): 0.8, (5, True): 1.0}
    requests = [
        sorted(json.dumps(seen.body, sort_keys=True) for seen in part)
        for part in (gateway.model.seen[start:between], gateway.model.seen[between:])
    ]
    assert requests[0] == requests[1]
    assert len(requests[0]) == 12  # three calls of each episode
    assert all(json.loads(body)["temperature"] == 0.3 for body in requests[0])
    assert before == after
