"""What other papers bring: whose folder is removed is gone, and nothing else is; Reflexion's and Self-RAG's loops."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.config import load_settings

from .harness import BLOCK, ROOMS, running_gateway, turns

ROOT = Path(__file__).parents[2]
PAPERS = {
    "algorithm.advantage=gigpo": "gigpo",
    "algorithm.advantage=rlvmr": "rlvmr",
    "algorithm.novelty=rnd": "rnd",
    "memory.retrieval=value": "memrl",
    "memory.retrieval=newest": "reflexion",
    "memory.retrieval=actions": "rememberer",
    "reflection.form=actions": "rememberer",
    "reflection.form=procedure": "memp",
    "tasks.starts=by-count": "go_explore",
    "tasks.starts=by-policy": "go_explore",
    "memory.judged=true": "self_rag",
    "critic.path=critic.pt": "retrospex",
}
# Makes a gateway's parts and the command line without any paper; prints why their settings are refused.
LOOK = """
import sys
from empo2.recipe.cli import verbs
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.gateway import app, memory

assert app.__file__.startswith(sys.argv[1]), app.__file__
memory.retrieval_policy(load_settings("cpu"))
for choice in sys.argv[2:]:
    try:
        load_settings("cpu", [choice])
    except ConfigError as error:
        print(error)
"""


def test_who_removes_a_folder_removes_the_paper(tmp_path: Path) -> None:
    """In a copy of the tree; tests/test_imports.py holds that nothing else imports a paper."""
    for name in ("recipe", "memory", "agents", "small_model"):
        ignored = shutil.ignore_patterns("__pycache__", "adapter")
        shutil.copytree(ROOT / name, tmp_path / "empo2" / name, ignore=ignored)
    for folder in {*PAPERS.values()}:
        shutil.rmtree(tmp_path / "empo2/recipe/baselines" / folder)
    command = [sys.executable, "-c", LOOK, str(tmp_path), *PAPERS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for (choice, folder), line in zip(PAPERS.items(), done.stdout.splitlines(), strict=True):
        key, value = choice.split("=")
        said = f"(?i){key}='?{value}'?: needs the folder recipe/baselines/{folder}, which was removed; put it back"
        assert re.match(said, line), line


@pytest.mark.parametrize("file", sorted(ROOT.glob("recipe/baselines/*/*.yaml")), ids=lambda file: file.stem)
def test_the_papers_settings_are_accepted(file: Path) -> None:
    load_settings("cpu", file=file)


async def test_reflexion_shows_the_newest_tips_of_failures_once(tmp_path: Path, empty_stores: None) -> None:
    """Three episodes fail and leave tips, one succeeds and leaves none; the next sees the newest two in all turns."""
    changes = ["memory.retrieval=newest", "memory.searched=first-turn", "memory.top_k=2", "reflection.of=failures"]
    async with running_gateway(tmp_path, *changes, "memory.min_similarity=-1") as gateway:
        await gateway.store_tips(ROOMS, "First.", "Second.", "Third.")
        gateway.tip = "Success."
        solved = await gateway.create("no-memory")
        await gateway.play(solved, ROOMS)
        await gateway.finish(solved, 100.0)
        assert (await gateway.drain())["empo2/tips_written"] == 0
        await gateway.play(await gateway.create("memory"), ROOMS)
        shown = [seen.prompt for seen in gateway.model.requests()[-3:]]
    for prompt in shown:
        assert prompt.count(BLOCK) == 1 and "- Third.\n- Second.\n" in prompt
        assert "First." not in prompt and "Success." not in prompt


async def test_a_search_before_the_episode_serves_all_of_its_chats(tmp_path: Path, empty_stores: None) -> None:
    """Of an agent that asks for a title first, and of one that sends the newest turns alone."""
    changes = ["memory.searched=first-turn", "memory.min_similarity=-1"]
    async with running_gateway(tmp_path, *changes) as gateway:
        await gateway.store_tips(ROOMS[:1], "First.")
        rollout = await gateway.create("memory")
        title, *_ = turns("a dark room with a lamp", system="Write a title.")
        alone = [turns(room, system="Play.")[0] for room in ("a dark room with a lamp", "it is lit", "a door opens")]
        await gateway.play(rollout, [title, *alone])
        shown = [seen.prompt for seen in gateway.model.requests()[-4:]]
        metrics = await gateway.ended(rollout)
    assert [prompt.count("- First.") for prompt in shown] == [1, 1, 1, 1]
    assert metrics["empo2/tips_injected_per_call"] == metrics["empo2/hit_rate"] == 1  # of one search


async def test_self_rag_shows_what_the_model_calls_helpful(tmp_path: Path, empty_stores: None) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if "Answer yes or no." not in str(body["messages"]):
            return gateway.reply(body)
        return " **Yes**, it does." if "Second" in str(body["messages"]) else "No."

    changes = ["memory.judged=true", "memory.searched=first-turn", "memory.min_similarity=-1"]
    async with running_gateway(tmp_path, *changes) as gateway:
        await gateway.store_tips(ROOMS, "First.", "Second.", "Third.")
        asked, gateway.model.reply = len(gateway.model.requests()), answer
        await gateway.play(await gateway.create("memory"), ROOMS)
        seen = gateway.model.requests()[asked:]
        metrics = await gateway.drain()
        gateway.model.fault = lambda path, body: 500 if "Answer yes or no." in str(body["messages"]) else None
        await gateway.play(await gateway.create("memory"), turns("a hall"))
        assert "Second." not in gateway.last().prompt  # what cannot be judged is not shown
        assert (await gateway.drain())["empo2/memory_failures"] == 1
    judged, calls = seen[:3], seen[3:]
    assert metrics["empo2/tips_judged/irrelevant"] == 2
    assert [each.body["temperature"] for each in judged] == [0] * 3
    assert all("a dark room with a lamp" in each.prompt for each in judged)
    shown = [[tip in each.prompt for tip in ("First.", "- Second.\n", "Third.")] for each in calls]
    assert shown == [[False, True, False]] * 3
