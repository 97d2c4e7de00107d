"""What results come to: each figure with its 95 % interval, by group of tasks and overall."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from empo2.recipe.evaluation.episode_results import Result
from empo2.recipe.evaluation.statistics import Interval, bootstrap
from empo2.recipe.failures import FAILED_BY_AGENT
from empo2.recipe.printed import one_line
from empo2.recipe.protocol import is_success

OVERALL, ALL_TASKS = "overall", "all tasks"  # the mean of the groups, and of their tasks
MEASURES = ("raw", "clipped", "success %", "won %", "length", "invalid %")
_WON = 0.7  # of a success's return: EMPO2's environment counts a finished ScienceWorld episode above 70 as won [code]

type Groups = Mapping[str, Sequence[int]]
"""The indices of the tasks of each group."""

type Means = dict[str, dict[int, float]]
"""By measure, the mean over the samples of each task, by the task's index."""


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    episodes: int  # that have a result
    failed: Mapping[str, int]  # of them, by cause
    values: Mapping[str, Interval]  # by measure


def _measured(result: Result, success_return: float, agent_fails: bool) -> dict[str, float]:
    """Return those of the `MEASURES` that an episode has: none if it failed, or as `task_means` says."""
    if (value := result.return_) is None:
        return {"success %": 0.0} if agent_fails and result.failed == FAILED_BY_AGENT else {}
    found = {
        "raw": value,
        "clipped": max(value, 0.0),
        "success %": 100.0 * is_success(value, success_return),
        "won %": 100.0 * (value > _WON * success_return),
        "length": float(result.calls),
    }
    invalid = result.metrics.get("invalid_actions", result.metrics.get("corrected_actions"))
    return found if invalid is None else {**found, "invalid %": 100.0 * invalid}


def task_means(results: Iterable[Result], success_return: float, *, agent_fails: bool = False) -> Means:
    """Return the means of the tasks over the samples that did not fail; tasks without one are left out.

    Args:
        agent_fails: True to count a sample that failed by its agent as one without success.
    """
    values: dict[str, defaultdict[int, list[float]]] = {name: defaultdict(list) for name in MEASURES}
    for result in results:
        for name, value in _measured(result, success_return, agent_fails).items():
            values[name][result.index].append(value)
    return {name: {index: float(np.mean(found)) for index, found in tasks.items()} for name, tasks in values.items()}


def summarize(results: Sequence[Result], groups: Groups, success_return: float) -> dict[str, Line]:
    """Return the lines of the table by group, and last the means of several groups and of all their tasks."""
    lines, everything = {}, [index for indices in groups.values() for index in indices]
    for name, values in _intervals(task_means(results, success_return), groups).items():
        inside = set(groups.get(name, everything))
        own = [result for result in results if result.index in inside]
        lines[name] = Line(len(own), dict(Counter(result.failed for result in own if result.failed)), values)
    return lines


def differences(
    before: Sequence[Result], after: Sequence[Result], groups: Groups, success_return: float
) -> dict[str, dict[str, Interval]]:
    """Return ``after`` minus ``before`` for each group and measure, task by task, so that a task is its own control.

    Tasks that only one of them has are left out.
    """
    old, new = task_means(before, success_return), task_means(after, success_return)
    gained = {name: {i: new[name][i] - old[name][i] for i in old[name].keys() & new[name]} for name in MEASURES}
    return _intervals(gained, groups)


def _intervals(means: Means, groups: Groups) -> dict[str, dict[str, Interval]]:
    """Return the intervals of each group's measures, and last those of several groups and of all their tasks."""
    parts: dict[str, list[Sequence[int]]] = {name: [indices] for name, indices in groups.items()}
    if len(groups) > 1:
        parts[OVERALL] = list(groups.values())
        parts[ALL_TASKS] = [[index for indices in groups.values() for index in indices]]
    return {
        name: {
            measure: bootstrap([[tasks[index] for index in indices if index in tasks] for indices in sets])
            for measure, tasks in means.items()
        }
        for name, sets in parts.items()
    }


def failures_line(results: Iterable[Result], counted: str = "in no mean") -> str:
    """Return one line on the failed episodes, and as what they are ``counted``; empty without any."""
    failed = [result for result in results if result.failed]
    if not failed:
        return ""
    causes = Counter(str(result.failed) for result in failed)
    said = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in causes.most_common())
    return f"failed episodes, {counted}: {said}; for example: {one_line(str(failed[-1].error))}"
