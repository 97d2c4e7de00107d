"""MapReader's levels, and the houses of each that runs are trained and measured on."""

from pathlib import Path

from ..houses.levels import Level, read_panel

PANELS = Path(__file__).with_name("panels.json")

LEVELS = {
    "easy": Level(rooms=11, distances=(1, 2), max_steps=8, chance=(0.5, 0.95)),
    "medium": Level(rooms=11, distances=(3,), max_steps=7, chance=(0.08, 0.2)),
    "hard": Level(rooms=20, distances=(5,), max_steps=11, chance=(0.0, 0.03)),
}


def panel(level: str) -> dict[str, list[int]]:
    """Return the seeds of a level's houses: "train" and "unseen"."""
    return read_panel(PANELS, level)
