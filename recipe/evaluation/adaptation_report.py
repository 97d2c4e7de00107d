"""The figures of adaptations by trial (returns, success, cumulative success, forgetting), printed and drawn."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.adaptation import TASKS, UNSEEN
from empo2.recipe.evaluation.episode_results import Result, read_facts, read_results, require_comparable
from empo2.recipe.evaluation.statistics import Interval, area, cumulative_success, forgetting, over_seeds
from empo2.recipe.evaluation.summary import MEASURES, Groups, failures_line, task_means
from empo2.recipe.evaluation.tables import interval_text, picture, show_table, table_of
from empo2.recipe.failures import FAILED_BY_SYSTEM
from empo2.recipe.protocol import is_success

_PART = re.compile(r"seed (\d+), trial (\d+), (\w+)")
_SHOWN = ("raw", "success %", "cumulative success %", "lost", "failing")
_DRAWN = ("raw", "success %", "cumulative success %")

type Curves = dict[str, np.ndarray]
"""By measure, [seeds, trials]: the mean over groups of the means of their tasks; NaN where nothing has a value."""


@dataclass(frozen=True)
class Adapted:
    """The curves of one adaptation by panel, as far as all its seeds have come."""

    name: str
    panels: Mapping[str, Curves]
    played: Mapping[str, Mapping[str, Any]]  # by panel, as `require_comparable`
    results: Sequence[Result]
    blind: bool  # True if its memory showed nothing after trial 0


def read_adaptation(folder: Path) -> Adapted:
    """Return the curves of the trials that every seed with results has completed; an Empo2Error if there are none."""
    facts, results = read_facts(folder), read_results(folder)
    by_part: dict[tuple[str, int, int], list[Result]] = {}
    for result in results:
        if match := _PART.fullmatch(result.part):
            by_part.setdefault((match[3], int(match[1]), int(match[2])), []).append(result)
    panels, played = {}, {}
    success_return = facts["algorithm"]["success_return"]
    for panel in (TASKS, UNSEEN):
        wanted = facts["episodes"].get(panel, 0)
        complete = {key[1:] for key, own in by_part.items() if key[0] == panel and len(own) == wanted}
        seeds = sorted({seed for seed, _ in complete})
        trials = min((next(t for t in range(10**6) if (seed, t) not in complete) for seed in seeds), default=0)
        if trials:
            found = [[by_part[panel, seed, trial] for trial in range(trials)] for seed in seeds]
            rows, groups = facts["rows"] if panel == TASKS else facts["unseen"][1], facts["groups"][panel]
            panels[panel] = curves(found, groups, success_return)
            played[panel] = {"rows": rows, "groups": groups, "success_return": success_return}
    if not panels:
        raise Empo2Error(f"{folder}: no trial is complete yet; go on with the same `empo2 adapt`")
    later = [result for (_, _, trial), own in by_part.items() if trial for result in own]
    blind = bool(later) and facts["memory_use"] != "off" and not any(result.calls_with_tips for result in later)
    return Adapted(folder.resolve().name, panels, played, results, blind)


def show_adaptations(folders: Sequence[Path], console: Console, target: Path) -> Path:
    """Print each adaptation's tables; return the picture of all their curves.

    Raises:
        Empo2Error: the folders do not compare (`require_comparable`), or as `read_adaptation`.
    """
    adapted = [read_adaptation(folder) for folder in folders]
    for panel in (TASKS, UNSEEN):
        require_comparable([(each.name, each.played[panel]) for each in adapted if panel in each.played])
    for each in adapted:
        for panel, found in each.panels.items():
            print(f"\n{each.name}, {panel}")
            show_table(_trials_table(found), console)
            show_table(_figures_table(found), console)
            if said := forgetting_line(found):
                print(said)
        if said := failures_line(each.results, "in no mean return, and by the agent no success"):
            print(said)
        if each.blind:
            print("warning  no call was shown a tip: lower memory.min_similarity or raise memory.episode_tokens")
    return _draw(adapted, target / "adaptation.png")


def _trials_table(found: Curves) -> Table:
    """Return a table with a line per trial: means over seeds above their intervals."""
    table = table_of("trial", *_SHOWN)
    columns = [by_trial(found[name]) for name in _SHOWN]
    for trial, cells in enumerate(zip(*columns, strict=True)):
        table.add_row(str(trial), *map(interval_text, cells))
    return table


def _figures_table(found: Curves) -> Table:
    """Return a table of first, last and best trial and of the area under the curve."""
    rows = {name: figures(found[name]) for name in _DRAWN}
    table = table_of("", *rows[_DRAWN[0]])
    for name, values in rows.items():
        table.add_row(name, *map(interval_text, values.values()))
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


def curves(trials: Sequence[Sequence[Sequence[Result]]], groups: Groups, success_return: float) -> Curves:
    """Return the curve of each measure, of results by seed and trial, all of one panel."""
    means = [[task_means(results, success_return, agent_fails=True) for results in seed] for seed in trials]
    found = {name: np.array([[_mean(trial[name], groups) for trial in seed] for seed in means]) for name in MEASURES}
    solved = [_solved(seed, success_return) for seed in trials]
    by_group = [
        [cumulative_success(each[:, np.isin(tasks, group)]) for group in groups.values()] for tasks, each in solved
    ]
    found["cumulative success %"] = 100 * np.mean(by_group, axis=1)
    lost, failing = zip(*(forgetting(each) for _, each in solved), strict=True)
    found["lost"], found["failing"] = np.array(lost, float), np.array(failing, float)
    with np.errstate(invalid="ignore", divide="ignore"):
        found["forgetting %"] = 100 * found["lost"] / found["failing"]
    return found


def figures(curve: np.ndarray) -> dict[str, Interval]:
    """Return what a curve [seeds, trials] comes to, each a mean over seeds with its interval.

    The best of a seed's trials is an oracle's figure: the trial is chosen by its own result. The area is that under the
    curve, divided by its width.
    """
    values = {
        "first": curve[:, 0],
        "last": curve[:, -1],
        "best (oracle)": curve.max(axis=1),
        "area": np.array([area(seed) for seed in curve.tolist()]),
    }
    return {name: over_seeds(each.tolist()) for name, each in values.items()}


def by_trial(curve: np.ndarray) -> list[Interval]:
    """Return the mean over seeds of each trial, with its interval."""
    return [over_seeds(values) for values in curve.T.tolist()]


def _mean(tasks: Mapping[int, float], groups: Groups) -> float:
    parts = [[tasks[index] for index in indices if index in tasks] for indices in groups.values()]
    return float(np.mean([np.mean(part) for part in parts if part])) if any(parts) else np.nan


def _solved(trials: Sequence[Sequence[Result]], success_return: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of tasks [tasks * samples], and bool [trials, tasks * samples], a column for each sample.

    One that failed by its agent is not solved; one that failed by the system is as in the trial before.
    """
    keys = sorted({(result.index, result.sample) for results in trials for result in results})
    places = {key: place for place, key in enumerate(keys)}
    solved = np.zeros((len(trials), len(keys)), bool)
    for trial, results in enumerate(trials):
        for result in results:
            place = places[result.index, result.sample]
            if result.failed == FAILED_BY_SYSTEM:
                solved[trial, place] = trial > 0 and solved[trial - 1, place]
            elif result.return_ is not None:
                solved[trial, place] = is_success(result.return_, success_return)
    return np.array([index for index, _ in keys]), solved
