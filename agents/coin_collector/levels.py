"""How hard a house is to search: named levels, and the houses of each that runs are trained and measured on."""

import json
from dataclasses import dataclass
from pathlib import Path

PANELS = Path(__file__).with_name("panels.json")


@dataclass(frozen=True)
class Level:
    """What the houses of a level have in common.

    rooms: of a house. distances: moves from the start to the coin. max_steps: actions of an episode.
    chance: how often a scripted explorer, which does not know the house, finds the coin, from and to. It depends on
    the doors that lead elsewhere more than on the distance.
    """

    rooms: int
    distances: tuple[int, ...]
    max_steps: int
    chance: tuple[float, float]


LEVELS = {
    "easy": Level(rooms=11, distances=(2, 3), max_steps=7, chance=(0.35, 0.65)),
    "medium": Level(rooms=11, distances=(4,), max_steps=6, chance=(0.08, 0.15)),
    "hard": Level(rooms=11, distances=(4,), max_steps=6, chance=(0.0, 0.04)),
}


def panel(level: str) -> dict[str, list[int]]:
    """Return the seeds of a level's houses: "train" and "unseen", none of which made the small model."""
    return json.loads(PANELS.read_text())[level]
