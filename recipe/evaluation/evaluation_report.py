"""Print evaluations and compare them: paired differences with intervals, and one picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.episode_results import FACTS_FILE, Result, read_results
from empo2.recipe.evaluation.player import MEMORY_OFF, MEMORY_ON
from empo2.recipe.evaluation.statistics import Interval
from empo2.recipe.evaluation.summary import (
    OVERALL,
    differences,
    differences_table,
    failures_line,
    results_table,
    show_table,
    summarize,
)

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class Evaluation:
    """One part of an evaluation's folder: a model on a panel, with or without memory.

    Attributes:
        name: the folder's, and the part's where it has several.
        rows: checksum of the panel's rows; only equal panels can be compared.
    """

    name: str
    part: str
    rows: str
    groups: Mapping[str, Sequence[int]]
    success_return: float
    results: Sequence[Result]


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Return the evaluations in a folder, the one without memory first.

    Raises:
        Empo2Error: there is no result in it.
    """
    facts = json.loads((folder / FACTS_FILE).read_text())
    results = read_results(folder)
    parts = [part for part in (MEMORY_OFF, MEMORY_ON) if any(result.part == part for result in results)]
    if not parts:
        raise Empo2Error(f"{folder}: no episode has ended yet; go on with the same `empo2 eval`")
    name = folder.resolve().name
    return [
        Evaluation(
            name if len(parts) == 1 else f"{name}, {part}",
            part,
            facts["rows"],
            facts["groups"],
            facts["algorithm"]["success_return"],
            [result for result in results if result.part == part],
        )
        for part in parts
    ]


def print_evaluation(folder: Path, console: "Console") -> None:
    """Print the tables of a folder's results, and write their numbers to ``summary.json``."""
    evaluations = read_evaluations(folder)
    summary: dict[str, Any] = {}
    for evaluation in evaluations:
        lines = summarize(evaluation.results, evaluation.groups, evaluation.success_return)
        summary[evaluation.part] = {name: asdict(line) for name, line in lines.items()}
        console.print(f"\n{evaluation.name}", style="bold", soft_wrap=True, highlight=False, markup=False)
        show_table(results_table(lines), console)
        if said := failures_line(evaluation.results):
            console.print(said, soft_wrap=True, highlight=False, markup=False)
        console.print(_cost(evaluation.results), soft_wrap=True, highlight=False)
    if len(evaluations) == 2:
        without, with_tips = evaluations
        summary["difference"] = _print_difference(without, with_tips, console)
    text = json.dumps(summary, indent=1, default=list).replace("NaN", "null")
    (folder / SUMMARY_FILE).write_text(text)


def compare(folders: Sequence[Path], console: "Console") -> Path:
    """Print each evaluation, and the differences of all others from the first; return the picture of them.

    Raises:
        Empo2Error: the folders are not of one panel.
    """
    evaluations = [evaluation for folder in folders for evaluation in read_evaluations(folder)]
    first = evaluations[0]
    for other in evaluations[1:]:
        if other.rows != first.rows:
            raise Empo2Error(f"{other.name}: was played on other tasks than {first.name}; compare results of one panel")
    for folder in folders:
        print_evaluation(folder, console)
    if len(folders) > 1:
        for other in evaluations[1:]:
            if other.name.partition(",")[0] != first.name.partition(",")[0]:
                _print_difference(first, other, console)
    return _draw(evaluations, folders[0].resolve().parent if len(folders) > 1 else folders[0])


def _print_difference(before: Evaluation, after: Evaluation, console: "Console") -> dict[str, dict[str, Interval]]:
    lines = differences(before.results, after.results, before.groups, before.success_return)
    title = f"\n{after.name}  minus  {before.name}, task by task"
    console.print(title, style="bold", soft_wrap=True, highlight=False, markup=False)
    show_table(differences_table(lines), console)
    return lines


def _cost(results: Sequence[Result]) -> str:
    calls = sum(result.calls for result in results)
    with_tips = sum(result.calls_with_tips for result in results)
    tokens = sum(result.prompt_tokens for result in results), sum(result.reply_tokens for result in results)
    tips = f"; tips in {with_tips / calls:.0%} of the calls" if with_tips else ""
    return (
        f"{len(results):,} episodes, {calls:,} calls, {tokens[0]:,} prompt tokens and {tokens[1]:,} reply tokens{tips}"
    )


def _draw(evaluations: Sequence[Evaluation], folder: Path) -> Path:
    """Draw mean return and success of each group with intervals, a color for each evaluation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    headings = ("raw", "success %")
    lines = [summarize(each.results, each.groups, each.success_return) for each in evaluations]
    names = list(reversed(lines[0]))
    height = 1.2 + len(names) * (0.22 + 0.16 * len(evaluations))
    figure, panels = plt.subplots(1, 2, figsize=(10, height), sharey=True, layout="constrained", squeeze=False)
    for axes, heading in zip(panels[0], headings, strict=True):
        for number, (evaluation, line) in enumerate(zip(evaluations, lines, strict=True)):
            offset = 0.7 * ((len(evaluations) - 1) / 2 - number) / max(len(evaluations), 2)
            for place, name in enumerate(names):
                if name in line:
                    value = line[name].values[heading]
                    axes.plot([value.low, value.high], [place + offset] * 2, color=f"C{number}")
                    label = evaluation.name if place == 0 else None
                    axes.plot(value.mean, place + offset, "o", color=f"C{number}", label=label, markersize=4)
        axes.set_title("mean return" if heading == "raw" else heading, loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    panels[0][0].set_yticks(range(len(names)), [name if name != OVERALL else "mean of the tasks" for name in names])
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    target = folder / "evaluation.png"
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target
