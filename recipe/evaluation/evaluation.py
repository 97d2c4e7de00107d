"""Evaluate a model on a panel, without memory and with it."""

from collections.abc import Callable, Sequence

from empo2.recipe.evaluation.panels import Panel
from empo2.recipe.evaluation.play import Player
from empo2.recipe.evaluation.results import Planned, Result, Results

MEMORY_OFF, MEMORY_ON = "memory off", "memory on"


def planned_episodes(panel: Panel, parts: Sequence[str], samples: int) -> list[Planned]:
    """Return all episodes of an evaluation: each task ``samples`` times in each part, by sample, so that an
    interrupted evaluation has seen all tasks equally often.

    Args:
        parts: ``MEMORY_OFF``, ``MEMORY_ON`` or both.
    """
    return [
        Planned(part, index, sample, row, memory="read" if part == MEMORY_ON else "off")
        for sample in range(samples)
        for part in parts
        for index, row in enumerate(panel.rows)
    ]


def play_missing(
    player: Player, results: Results, planned: Sequence[Planned], show: Callable[[Result], None] = lambda result: None
) -> None:
    """Play the episodes that have no result yet, and keep each result as it comes."""
    for result in player.play(results.missing(planned)):
        results.add(result)
        show(result)
