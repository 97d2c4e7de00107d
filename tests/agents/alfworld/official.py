"""Official game files: all of ALFWorld from ../shared/worlds, where it is there, and any others as files."""

import functools
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

WORLDS = Path(__file__).parents[4] / "shared" / "worlds" / "alfworld"


def need_worlds() -> None:
    """Skip the test, saying why, unless ALFWorld's games are there."""
    if not WORLDS.is_dir():
        pytest.skip(f"needs ALFWorld's games in {WORLDS.relative_to(WORLDS.parents[2])}, beside the project's folder")


@functools.cache
def official_games(split: str) -> dict[str, dict[str, Any]]:
    """Return all official game files of a split, by name."""
    domain, grammar = ((WORLDS / name).read_text() for name in ("alfred.pddl", "alfred.twl2"))
    with lzma.open(WORLDS / f"{split}.pddl.json.xz") as file:
        games = json.load(file)
    return {
        name: {
            "pddl_domain": domain,
            "grammar": grammar.replace("UNKNOWN TASK", game["task"]),
            "pddl_problem": game["pddl_problem"],
            "solvable": True,
            "walkthrough": game["walkthrough"],
        }
        for name, game in games.items()
    }


@functools.cache
def official_wordings() -> dict[str, list[str]]:
    """Return what people wrote of the goal of each official game, by "split/name"."""
    with lzma.open(WORLDS / "human_goals.json.xz") as file:
        return json.load(file)


def write_official(
    folder: Path, split: str, games: Mapping[str, Mapping[str, Any]], wordings: Mapping[str, Sequence[str]]
) -> None:
    """Write game files into the folders of an official json_2.1.1."""
    for name, game in games.items():
        trial = folder / split / name
        trial.mkdir(parents=True)
        (trial / "game.tw-pddl").write_text(json.dumps(game))
        said = {"anns": [{"task_desc": text} for text in wordings.get(name, [])]}
        (trial / "traj_data.json").write_text(json.dumps({"turk_annotations": said}))
