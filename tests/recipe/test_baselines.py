"""What other papers bring: whose folder is removed is gone, and nothing else is; Reflexion's and Self-RAG's loops."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from empo2.memory.retrieval import Entries, Ranked
from empo2.recipe.config import load_settings

from .harness import ROOMS, running_gateway

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipe/baselines"
PAPERS = {
    "gigpo": "algorithm.advantage=gigpo",
    "memrl": "memory.retrieval=value",
    "reflexion": "memory.retrieval=newest",
    "self_rag": "memory.judged=true",
}
# Imports what is left, prints why a paper's settings are refused, and the verbs of the command line.
LOOK = """
import importlib, pkgutil, sys
import empo2.recipe.trainer.ray_environment
from empo2.recipe import trainer
from empo2.recipe.cli.verbs import _command
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
print("verbs", *_command.commands, *(f"memory {name}" for name in _command.commands["memory"].commands), sep=";")
for module in pkgutil.iter_modules(trainer.__path__):
    importlib.import_module(f"empo2.recipe.trainer.{module.name}")
"""


@pytest.mark.timeout(900)  # verl is imported, which takes minutes beside other tests on two cores
def test_who_removes_a_folder_removes_the_paper(tmp_path: Path) -> None:
    """In a copy of the tree: everything else is imported and works; what was removed is refused."""
    for name in ("recipe", "memory", "agents"):
        shutil.copytree(ROOT / name, tmp_path / "empo2" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for paper in PAPERS:
        shutil.rmtree(tmp_path / "empo2/recipe/baselines" / paper)
    command = [sys.executable, "-c", LOOK, str(tmp_path), *PAPERS.values()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *refused, verbs = done.stdout.splitlines()
    for (paper, choice), line in zip(PAPERS.items(), refused, strict=True):
        (key, value) = choice.split("=")
        said = value.capitalize() if value == "true" else repr(value)
        assert line == (
            f"{key}={said}: needs the folder recipe/baselines/{paper}, which was removed; put it back, or leave the "
            "setting as config.yaml has it"
        )
    assert {"train", "eval", "memory search"} <= set(verbs.split(";"))
    assert not {"memory values", "memory similarities"} & set(verbs.split(";"))  # of memrl


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*/*.yaml")), ids=lambda file: file.stem)
def test_the_papers_settings_are_accepted(file: Path) -> None:
    load_settings("cpu", file=file)


# Reflexion


def test_the_newest_come_first_each_text_once() -> None:
    columns = Entries(
        similarities=np.array([0.6, 0.9, 0.4, 0.7, 0.8, 0.7]),
        scores=np.array([9.0, 9, 9, 1, 1, 1]),
        values=np.zeros(6),
        texts=np.array([0, 1, 2, 3, 1, 4]),
    )
    assert Ranked((), 10, 0.5)(columns).tolist() == [5, 4, 3, 0]
    assert Ranked((), 2, -1)(columns).tolist() == [5, 4]


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
        assert prompt.count("Notes from earlier episodes") == 1
        assert "- Third.\n- Second.\n" in prompt
        assert "First." not in prompt and "Success." not in prompt


# Self-RAG


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
    judged, calls = seen[:3], seen[3:]
    assert metrics["empo2/tips_judged/irrelevant"] == 2
    assert [each.body["temperature"] for each in judged] == [0] * 3
    assert all("a dark room with a lamp" in each.prompt for each in judged)
    assert len(calls) == 3
    for each in calls:
        assert "- Second.\n" in each.prompt
        assert "First." not in each.prompt and "Third." not in each.prompt


async def test_tips_that_cannot_be_judged_are_not_shown(tmp_path: Path, empty_stores: None) -> None:
    async with running_gateway(tmp_path, "memory.judged=true", "memory.min_similarity=-1") as gateway:
        await gateway.store_tips(ROOMS, "First.")
        gateway.model.fault = lambda path, body: 500 if "Answer yes or no." in str(body["messages"]) else None
        await gateway.play(await gateway.create("memory"), ROOMS[:1])
        assert "First." not in gateway.last().prompt
        assert (await gateway.drain())["empo2/memory_failures"] == 1
