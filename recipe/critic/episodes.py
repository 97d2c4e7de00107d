"""The turns of evaluated episodes, from which a critic learns: ``turns.jsonl``, an episode a line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from empo2.recipe.errors import ConfigError
from empo2.recipe.redaction import redacted
from empo2.recipe.run_folder import read_lines

TURNS_FILE = "turns.jsonl"


class Turn(NamedTuple):
    """A model call: the beginning of the chat's first user message, the state, and the reply."""

    task: str
    state: str
    action: str


@dataclass(frozen=True)
class Episode:
    """An episode that did not fail.

    Attributes:
        key: part, index and sample; a later line of the same key replaces an earlier one.
        return_: in the environment's own units.
    """

    key: tuple[str, int, int]
    return_: float
    turns: Sequence[Turn]


def append_episode(folder: Path, episode: Episode) -> None:
    """Add an episode to the folder's file, without secrets."""
    part, index, sample = episode.key
    line = {"part": part, "index": index, "sample": sample, "return": episode.return_, "turns": episode.turns}
    with (folder / TURNS_FILE).open("a") as file:
        file.write(json.dumps(redacted(line)) + "\n")


def read_episodes(folder: Path) -> list[Episode]:
    """Return the episodes in a folder that have turns.

    Raises:
        ConfigError: there are none.
    """
    found: dict[Any, Episode] = {}
    for line in read_lines(folder / TURNS_FILE):
        if line["turns"]:
            key = line["part"], line["index"], line["sample"]
            episode = Episode(key, line["return"], [Turn(*turn) for turn in line["turns"]])
            found[episode.key] = episode
    if not found:
        raise ConfigError(f"FOLDER {folder}: has no {TURNS_FILE}; it is written by empo2 eval with --keep-turns")
    return list(found.values())
