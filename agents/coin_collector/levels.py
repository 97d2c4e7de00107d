"""CoinCollector's levels, and the houses of each that runs are trained and measured on."""

from pathlib import Path

from ..houses.levels import Level, read_panel

PANELS = Path(__file__).with_name("panels.json")

LEVELS = {
    "easy": Level(rooms=11, distances=(2, 3), max_steps=7, chance=(0.35, 0.65)),
    "medium": Level(rooms=11, distances=(4,), max_steps=6, chance=(0.08, 0.15)),
    "hard": Level(rooms=11, distances=(4,), max_steps=6, chance=(0.0, 0.04)),
}


def panel(level: str) -> dict[str, list[int]]:
    """Return the seeds of a level's houses: "train" and "unseen", none of which made the small model."""
    return read_panel(PANELS, level)
