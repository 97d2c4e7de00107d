"""Coding agents, installed and played as they are: their rows, side calls and tips against docs/agents.md.

With EMPO2_RECORD=1 (`make recordings`) what they send is written to tests/recipe/recorded.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from empo2.agents.coding.known import KNOWN
from empo2.recipe.controller.agent_process import ALONE

from .coding_agents import SCRIPTS, SMALL, TASK, TIP, install, script, table
from .harness import ROOMS, STORES, running_gateway, trained
from .model_server import ModelServer
from .recordings import RECORDED, recording

pytestmark = [pytest.mark.rare, pytest.mark.slow, pytest.mark.usefixtures("quiet", "empty_stores")]


@dataclass(frozen=True)
class Played:
    """Training rows, untrained calls, tokens of the main chat's first prompt, and the tips in each of its prompts."""

    rows: int
    side_calls: float
    first_prompt: int
    tips: list[int]


@pytest.fixture
def prefix() -> Iterator[Path]:
    """A folder that the agents' rooms show, unlike those below /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def recorded_as(agent: str, variant: str) -> str:
    return "_".join([*agent.split("-"), *filter(None, [variant])])


async def play(
    agent: str, programs: Path, folder: Path, variant: str = "", words: str = "", more: Mapping[str, str] | None = None
) -> Played:
    """Play an episode in memory mode, in which every state finds the tip."""
    folder.mkdir()
    for store in STORES:  # the model of an episode before
        store.clear()
    model = ModelServer(context=200_000)
    settings = ("gateway.cumulative_tokens=true", "memory.min_similarity=-1")
    async with running_gateway(folder, *settings, model=model) as gateway:
        await gateway.store_tips(ROOMS, TIP)
        before = len(model.requests())
        model.reply = script(agent, variant)
        rollout = await gateway.create("memory", "off-policy")
        with recording(recorded_as(agent, variant), gateway.variables(rollout)) as variables:
            command = f"{sys.executable} -m empo2.agents.coding --path {programs} {agent} {words}"
            environment = {**os.environ, **variables, **(more or {}), "TASK_FOLDER": str(TASK)}
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", ALONE, "empo2.agents.command:CommandAgent"],
                env={**environment, "AGENT_COMMAND": command},
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        assert [event["value"] for event in await gateway.events(rollout, "reward")] == [1.0], done.stderr
        asked = model.requests()[before:]
        (await gateway.patch(rollout, "succeeded")).raise_for_status()
        told = await gateway.drain()
        rows, _, _, results = await trained(gateway, rollout, limit=100_000)
    main = [seen for seen in asked if seen.body.get("tools")] or asked
    side = told["empo2/side_calls"] + results.left_out["side_calls_dropped"]
    return Played(len(rows), side, len(main[0].prompt_ids), [seen.prompt.count(TIP) for seen in main])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("agent", SCRIPTS)
async def test_rows_side_calls_and_tips(agent: str, tmp_path: Path, prefix: Path) -> None:
    if KNOWN[agent].install.startswith("npm") and shutil.which("npm") is None:
        pytest.skip("needs npm")
    row = table()[agent]
    programs = install(agent, row.version, prefix)
    played = await play(agent, programs, tmp_path / "plain")
    assert (played.rows, played.side_calls) == (1, agent == "opencode")
    assert played.tips == [1] * len(played.tips)
    assert played.first_prompt == pytest.approx(row.first_prompt, rel=0.03)
    if agent in SMALL:
        variables, words = SMALL[agent]
        small = await play(agent, programs, tmp_path / "small", "small", words, variables)
        assert small.rows == 1 and small.first_prompt == pytest.approx(row.small_prompt, rel=0.03)
    for variant in ("thinking", "broken_arguments"):
        if os.environ.get("EMPO2_RECORD") == "1" and (RECORDED / f"{recorded_as(agent, variant)}.jsonl").exists():
            await play(agent, programs, tmp_path / variant, variant)


def test_the_table_has_all_agents() -> None:
    assert {*table()} == {*SCRIPTS} == {*KNOWN} - {"command"}
