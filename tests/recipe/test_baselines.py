"""What other papers bring: whose folder is removed is gone, and nothing else is; Reflexion's and Self-RAG's loops."""

from pathlib import Path
from typing import Any

import pytest
import typer

from empo2.recipe import baselines
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError

from .harness import BLOCK, ROOMS, running_gateway, turns

PAPERS = {
    "algorithm.advantage=gigpo": "gigpo",
    "memory.retrieval=value": "memrl",
    "memory.retrieval=newest": "reflexion",
    "memory.judged=true": "self_rag",
}


def test_who_removes_a_folder_removes_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_imports.py holds that nothing else imports it."""
    verbs = typer.Typer()
    baselines.add_memory_verbs(verbs)
    assert len(verbs.registered_groups) == 1
    monkeypatch.setattr(baselines, "__file__", str(tmp_path / "__init__.py"))
    for choice, folder in PAPERS.items():
        key, value = choice.split("=")
        said = f"(?i){key}='?{value}'?: needs the folder recipe/baselines/{folder}, which was removed; put it back"
        with pytest.raises(ConfigError, match=said):
            load_settings("cpu", [choice])
    verbs = typer.Typer()
    baselines.add_memory_verbs(verbs)
    assert not verbs.registered_groups


@pytest.mark.parametrize("file", sorted(Path(baselines.__file__).parent.glob("*/*.yaml")), ids=lambda file: file.stem)
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
