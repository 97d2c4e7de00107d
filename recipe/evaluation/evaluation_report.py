"""Print evaluations and compare them: paired differences with intervals, and one picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.episode_results import Result, read_facts, read_results, require_comparable
from empo2.recipe.evaluation.player import MEMORY_OFF, MEMORY_ON
from empo2.recipe.evaluation.statistics import Interval
from empo2.recipe.evaluation.summary import MEASURES, OVERALL, Line, differences, failures_line, summarize
from empo2.recipe.evaluation.tables import interval_text, picture, show_table, table_of

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class Evaluation:
    """One part of an evaluation's folder: a model on a panel, with or without memory."""

    name: str  # the folder's, and the part's where it has several
    part: str
    facts: dict[str, Any]  # what decided the results
    results: Sequence[Result]
    lines: Mapping[str, Line]  # of its table, by group


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Return the evaluations in a folder, the one without memory first; an Empo2Error if there is no result in it."""
    facts, results, name = read_facts(folder), read_results(folder), folder.resolve().name
    by_part = {part: [each for each in results if each.part == part] for part in (MEMORY_OFF, MEMORY_ON)}
    found = {part: own for part, own in by_part.items() if own}
    if not found:
        raise Empo2Error(f"{folder}: no episode has ended yet; go on with the same `empo2 eval`")
    panel = facts["groups"], facts["algorithm"]["success_return"]
    return [
        Evaluation(name if len(found) == 1 else f"{name}, {part}", part, facts, own, summarize(own, *panel))
        for part, own in found.items()
    ]


def show_evaluations(folders: Sequence[Path], console: Console) -> list[Evaluation]:
    """Print each evaluation, and the differences of all others from the first; return them.

    The numbers of each folder's tables are written to its ``summary.json``.

    Raises:
        Empo2Error: the folders do not compare (`require_comparable`), or as `read_evaluations`.
    """
    found = {folder: read_evaluations(folder) for folder in folders}
    first, *others = (evaluation for parts in found.values() for evaluation in parts)
    require_comparable([(each.name, each.facts | each.facts["algorithm"]) for each in (first, *others)])
    for folder, parts in found.items():
        _show_folder(folder, parts, console)
    for other in others:
        if other not in found[folders[0]]:
            _show_difference(first, other, console)
    return [first, *others]


def _show_folder(folder: Path, parts: Sequence[Evaluation], console: Console) -> None:
    summary: dict[str, Any] = {}
    for evaluation in parts:
        summary[evaluation.part] = {name: asdict(line) for name, line in evaluation.lines.items()}
        print(f"\n{evaluation.name}")
        show_table(_results_table(evaluation.lines), console)
        print(*filter(None, [failures_line(evaluation.results), _cost(evaluation.results)]), sep="\n")
    if len(parts) == 2:
        summary["difference"] = _show_difference(parts[0], parts[1], console)
    text = json.dumps(summary, indent=1, default=list).replace("NaN", "null")
    (folder / SUMMARY_FILE).write_text(text)


def _show_difference(before: Evaluation, after: Evaluation, console: Console) -> dict[str, dict[str, Interval]]:
    facts = before.facts
    lines = differences(before.results, after.results, facts["groups"], facts["algorithm"]["success_return"])
    print(f"\n{after.name}  minus  {before.name}, task by task")
    shown = _known(lines)
    table = table_of("task", *shown, text=["task"])
    for name, values in lines.items():
        table.add_row(Text(name), *(interval_text(values[measure], sign="+") for measure in shown))
    show_table(table, console)
    return lines


def _results_table(lines: Mapping[str, Line]) -> Table:
    """Return a table with a line per group: means above their intervals."""
    shown = _known({name: line.values for name, line in lines.items()})
    table = table_of("task", "episodes", *shown, "failed", text=["task"])
    for name, line in lines.items():
        failed = str(sum(line.failed.values()) or "")
        cells = (interval_text(line.values[measure]) for measure in shown)
        table.add_row(Text(name), str(line.episodes), *cells, failed)
    return table


def _known(lines: Mapping[str, Mapping[str, Interval]]) -> list[str]:
    """Return the measures that any line has."""
    return [name for name in MEASURES if any(np.isfinite(line[name].mean) for line in lines.values())]


def _cost(results: Sequence[Result]) -> str:
    def total(field: str) -> int:
        return sum(getattr(result, field) for result in results)

    calls, with_tips = total("calls"), total("calls_with_tips")
    tips = f"; tips in {with_tips / calls:.0%} of the calls" if with_tips else ""
    return (
        f"{len(results):,} episodes, {calls:,} calls, {total('prompt_tokens'):,} prompt tokens and "
        f"{total('reply_tokens'):,} reply tokens{tips}"
    )


def draw_evaluations(evaluations: Sequence[Evaluation], folder: Path) -> Path:
    """Draw mean return and success of each group with intervals, a color for each evaluation; return the picture."""
    names = list(evaluations[0].lines)[::-1]
    target, height = folder / "evaluation.png", 1.2 + len(names) * (0.22 + 0.16 * len(evaluations))
    with picture(target, 1, 2, size=(10, height), sharey=True) as (figure, grid):
        for axes, measure, title in zip(grid[0], ("raw", "success %"), ("mean return", "success %"), strict=True):
            for number, evaluation in enumerate(evaluations):
                offset = 0.7 * ((len(evaluations) - 1) / 2 - number) / max(len(evaluations), 2)
                values = [evaluation.lines[name].values[measure] for name in names]
                places = np.arange(len(names)) + offset
                mean, low, high = np.array(values).T
                axes.hlines(places, low, high, color=f"C{number}")
                axes.plot(mean, places, "o", color=f"C{number}", label=evaluation.name, markersize=4)
            axes.set_title(title)
            axes.grid(visible=False, axis="y")
        labels = [name if name != OVERALL else "mean of the groups" for name in names]
        grid[0][0].set_yticks(range(len(names)), labels)
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center")
    return target
