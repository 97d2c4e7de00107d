"""Results as a table: each figure with its 95 % interval, by group of tasks and overall."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from empo2.recipe.evaluation.episode_results import Result
from empo2.recipe.evaluation.statistics import Interval, bootstrap

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

OVERALL = "overall"
_WIDEST = 1000  # characters of a line
_WON = 0.7  # of a success's return: EMPO2's environment counts a finished ScienceWorld episode above 70 as won [code]


class Measure(NamedTuple):
    """A figure of an episode; ``of`` returns None where the episode has none."""

    heading: str
    of: Callable[[Result], float | None]


def measures(success_return: float) -> tuple[Measure, ...]:
    """Return the table's figures. Only episodes that did not fail have any.

    Args:
        success_return: ``algorithm.success_return``.
    """

    def returned(of: Callable[[float], float]) -> Callable[[Result], float | None]:
        return lambda result: None if result.return_ is None else of(result.return_)

    return (
        Measure("raw", returned(lambda value: value)),
        Measure("clipped", returned(lambda value: max(value, 0.0))),
        Measure("success %", returned(lambda value: 100.0 * (value >= success_return))),
        Measure("won %", returned(lambda value: 100.0 * (value > _WON * success_return))),
        Measure("length", lambda result: None if result.return_ is None else float(result.calls)),
        Measure("invalid %", _invalid),
    )


def _invalid(result: Result) -> float | None:
    for name in ("invalid_actions", "corrected_actions"):
        if result.return_ is not None and name in result.metrics:
            return 100.0 * result.metrics[name]
    return None


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        episodes: that have a result.
        failed: of them, by cause.
        values: an interval for each measure, by its heading.
    """

    episodes: int
    failed: Mapping[str, int]
    values: Mapping[str, Interval]


def task_means(results: Iterable[Result], measure: Measure) -> dict[int, float]:
    """Return the mean of a measure over the samples of each task, by the task's index; tasks without one are left out.

    Sums are over the samples that did not fail.
    """
    values: dict[int, list[float]] = defaultdict(list)
    for result in results:
        if (value := measure.of(result)) is not None:
            values[result.index].append(value)
    return {index: float(np.mean(found)) for index, found in values.items()}


def summarize(results: Sequence[Result], groups: Mapping[str, Sequence[int]], success_return: float) -> dict[str, Line]:
    """Return the lines of the table by group, and last the one that is the mean of the groups.

    Args:
        groups: indices of the tasks of each group.
    """
    lines: dict[str, Line] = {}
    sets = {name: [list(indices)] for name, indices in groups.items()}
    if len(groups) > 1:
        sets[OVERALL] = [list(indices) for indices in groups.values()]
    for name, parts in sets.items():
        inside = {index for part in parts for index in part}
        own = [result for result in results if result.index in inside]
        values = {}
        for measure in measures(success_return):
            means = task_means(own, measure)
            values[measure.heading] = bootstrap([[means[i] for i in part if i in means] for part in parts])
        failed = dict(Counter(result.failed for result in own if result.failed))
        lines[name] = Line(len(own), failed, values)
    return lines


def differences(
    before: Sequence[Result], after: Sequence[Result], groups: Mapping[str, Sequence[int]], success_return: float
) -> dict[str, dict[str, Interval]]:
    """Return ``after`` minus ``before`` for each group and measure, task by task, so that a task is its own control.

    Tasks that only one of them has are left out.
    """
    lines: dict[str, dict[str, Interval]] = {}
    for measure in measures(success_return):
        old, new = task_means(before, measure), task_means(after, measure)
        pairs = [[new[i] - old[i] for i in part if i in old and i in new] for part in groups.values()]
        for name, part in zip(groups, pairs, strict=True):
            lines.setdefault(name, {})[measure.heading] = bootstrap([part])
        if len(groups) > 1:
            lines.setdefault(OVERALL, {})[measure.heading] = bootstrap(pairs)
    return dict(sorted(lines.items(), key=lambda line: line[0] == OVERALL))


def results_table(lines: Mapping[str, Line]) -> "Table":
    """Return a table with a line per group: means above their intervals."""
    shown = [heading for heading in _headings(lines) if any(_known(line.values[heading]) for line in lines.values())]
    table = table_of(["task", "episodes", *shown, "failed"])
    for name, line in lines.items():
        cells = [interval_text(line.values[heading]) for heading in shown]
        table.add_row(name, str(line.episodes), *cells, _failures(line.failed))
    return table


def differences_table(lines: Mapping[str, Mapping[str, Interval]]) -> "Table":
    """Return a table with a line per group: mean differences above their intervals."""
    headings = list(next(iter(lines.values())))
    shown = [heading for heading in headings if any(_known(line[heading]) for line in lines.values())]
    table = table_of(["task", *shown])
    for name, line in lines.items():
        table.add_row(name, *(interval_text(line[heading], sign="+") for heading in shown))
    return table


def interval_text(interval: Interval, sign: str = "") -> str:
    """Return a mean and, on a second line, its interval, if there is one; three digits each."""
    if not _known(interval):
        return ""
    mean, low, high = (_three_digits(value, sign) for value in interval)
    return mean if np.isnan(interval.low) else f"{mean}\n{low}…{high}"


def _three_digits(value: float, sign: str) -> str:
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 99.95 else 0
    return f"{value:{sign}.{decimals}f}"


def failures_line(results: Iterable[Result]) -> str:
    """Return one line on the failed episodes, which are in no mean; empty without any."""
    failed = [result for result in results if result.failed]
    if not failed:
        return ""
    causes = Counter(result.failed for result in failed)
    said = ", ".join(f"{count} {str(cause).replace('_', ' ')}" for cause, count in causes.most_common())
    return f"failed episodes, in no mean: {said}; for example: {failed[-1].error}"


def _headings(lines: Mapping[str, Line]) -> list[str]:
    return list(next(iter(lines.values())).values)


def _known(interval: Interval) -> bool:
    return not np.isnan(interval.mean)


def _failures(failed: Mapping[str, int]) -> str:
    return str(sum(failed.values())) if failed else ""


def table_of(headings: Sequence[str]) -> "Table":
    """Return an empty table; all columns but the first hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    return table


def show_table(table: "Table", console: "Console") -> None:
    """Print a table as wide as it is: a narrow terminal wraps its lines, but no figure is cut."""
    width = console.width
    whole = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    console.width = max(whole, width)  # `print` takes no width beyond it
    try:
        console.print(table)
    finally:
        console.width = width
