"""Print the figures of adaptations, and draw their curves with intervals over seeds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.adaptation import TASKS, UNSEEN
from empo2.recipe.evaluation.episode_results import Result, read_facts, read_results
from empo2.recipe.evaluation.summary import failures_line
from empo2.recipe.evaluation.tables import interval_text, picture, show_table, table_of
from empo2.recipe.evaluation.trial_curves import Curves, by_trial, curves, figures

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PART = re.compile(r"seed (\d+), trial (\d+), (\w+)")
_SHOWN = ("raw", "success %", "cumulative success %", "lost", "failing")
_DRAWN = ("raw", "success %", "cumulative success %")


@dataclass(frozen=True)
class Adapted:
    """The curves of one adaptation by panel, as far as all its seeds have come."""

    name: str
    panels: Mapping[str, Curves]
    results: Sequence[Result]


def read_adaptation(folder: Path) -> Adapted:
    """Return the curves of the trials that every seed with results has completed.

    Raises:
        Empo2Error: no trial is complete.
    """
    facts, results = read_facts(folder), read_results(folder)
    by_part: dict[tuple[str, int, int], list[Result]] = {}
    for result in results:
        if match := _PART.fullmatch(result.part):
            by_part.setdefault((match[3], int(match[1]), int(match[2])), []).append(result)
    panels = {}
    for panel in (TASKS, UNSEEN):
        wanted = facts["episodes"].get(panel, 0)
        complete = {key[1:] for key, own in by_part.items() if key[0] == panel and len(own) == wanted}
        seeds = sorted({seed for seed, _ in complete})
        trials = min((next(t for t in range(10**6) if (seed, t) not in complete) for seed in seeds), default=0)
        if trials:
            played = [[by_part[panel, seed, trial] for trial in range(trials)] for seed in seeds]
            panels[panel] = curves(played, facts["groups"][panel], facts["algorithm"]["success_return"])
    if not panels:
        raise Empo2Error(f"{folder}: no trial is complete yet; go on with the same `empo2 adapt`")
    return Adapted(folder.resolve().name, panels, results)


def show_adaptations(folders: Sequence[Path], console: "Console", target: Path) -> Path:
    """Print each adaptation's tables; return the picture of all their curves, in the folder ``target``.

    Raises:
        Empo2Error: as `read_adaptation`.
    """
    adapted = [read_adaptation(folder) for folder in folders]
    for each in adapted:
        for panel, found in each.panels.items():
            print(f"\n{each.name}, {panel}")
            show_table(_trials_table(found), console)
            show_table(_figures_table(found), console)
            if said := forgetting_line(found):
                print(said)
        if said := failures_line(each.results):
            print(said)
    return _draw(adapted, target / "adaptation.png")


def _trials_table(found: Curves) -> "Table":
    """Return a table with a line per trial: means over seeds above their intervals."""
    table = table_of("trial", *_SHOWN)
    columns = [by_trial(found[name]) for name in _SHOWN]
    for trial, cells in enumerate(zip(*columns, strict=True)):
        table.add_row(str(trial), *map(interval_text, cells))
    return table


def _figures_table(found: Curves) -> "Table":
    """Return a table of first, last and best trial and of the area under the curve."""
    table = table_of("", "first", "last", "best (oracle)", "area")
    for name in _DRAWN:
        table.add_row(name, *map(interval_text, figures(found[name])))
    return table


def forgetting_line(found: Curves) -> str:
    """Return one line with MemRL's forgetting rate, lost / failing, over the trials after the first; "" without any."""
    lost, failing, rate = (found[name][:, 1:] for name in ("lost", "failing", "forgetting %"))
    if not failing.sum():
        return ""
    mean = np.nanmean(rate)  # a trial in which nothing fails has none
    return f"forgetting {mean:.1f} %, mean over trials and seeds: {lost.sum():.0f} lost of {failing.sum():.0f} failing"


def _draw(adapted: Sequence[Adapted], target: Path) -> Path:
    panels = [panel for panel in (TASKS, UNSEEN) if any(panel in each.panels for each in adapted)]
    rows, columns = len(panels), len(_DRAWN)
    with picture(target, rows, columns, size=(4 * columns, 3.2 * rows)) as (_, grid):
        for row, panel in zip(grid, panels, strict=True):
            for axes, name in zip(row, _DRAWN, strict=True):
                for number, each in enumerate(adapted):
                    if panel in each.panels:
                        mean, low, high = np.array(by_trial(each.panels[panel][name])).T
                        axes.plot(mean, marker=".", color=f"C{number}", label=each.name)
                        axes.fill_between(range(len(mean)), low, high, color=f"C{number}", alpha=0.2, linewidth=0)
                axes.set_title(f"{'mean return' if name == 'raw' else name}, {panel}")
                axes.set_xlabel("trial (0: without memory)")
                axes.locator_params(axis="x", integer=True)
        grid[0][0].legend()
    return target
