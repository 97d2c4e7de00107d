"""How hard a house is to search: what the houses of a level have in common, and the file of their seeds."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Level:
    """What the houses of a level have in common.

    rooms: of a house. distances: moves from the start to the coin. max_steps: actions of an episode.
    chance: how often a scripted explorer, which does not know the house, succeeds, from and to. It depends on
    the doors that lead elsewhere more than on the distance.
    """

    rooms: int
    distances: tuple[int, ...]
    max_steps: int
    chance: tuple[float, float]


def read_panel(file: Path, level: str) -> dict[str, list[int]]:
    """Return the seeds of a level's houses: "train" and "unseen"."""
    return json.loads(file.read_text())[level]
