"""The figures of an adaptation by trial: returns, success, cumulative success, forgetting."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from empo2.recipe.evaluation.episode_results import Result
from empo2.recipe.evaluation.statistics import Interval, area, cumulative_success, forgetting, over_seeds
from empo2.recipe.evaluation.summary import Groups, task_means

type Curves = dict[str, np.ndarray]
"""By measure, [seeds, trials]: the mean over groups of the means of their tasks; NaN where nothing has a value."""


class Figures(NamedTuple):
    """What a curve comes to, each a mean over seeds with its interval.

    Attributes:
        best: of a seed's trials. It is an oracle's figure: the trial is chosen by its own result.
        area: under the curve, divided by its width.
    """

    first: Interval
    last: Interval
    best: Interval
    area: Interval


def curves(trials: Sequence[Sequence[Sequence[Result]]], groups: Groups, success_return: float) -> Curves:
    """Return the curve of each measure.

    Args:
        trials: results by seed and trial, all of one panel.
    """
    means = [[task_means(results, success_return) for results in seed] for seed in trials]
    found = {
        measure: np.array([[_mean(trial[measure], groups) for trial in seed] for seed in means])
        for measure in means[0][0]
    }
    solved = [_solved(seed, success_return) for seed in trials]
    found["cumulative success %"] = np.array([100 * cumulative_success(each) for each in solved])
    lost, failing = zip(*(forgetting(each) for each in solved), strict=True)
    found["lost"], found["failing"] = np.array(lost, float), np.array(failing, float)
    with np.errstate(invalid="ignore", divide="ignore"):
        found["forgetting %"] = 100 * found["lost"] / found["failing"]
    return found


def figures(curve: np.ndarray) -> Figures:
    """Return first, last, best and area of a curve [seeds, trials]."""
    return Figures(
        over_seeds(curve[:, 0].tolist()),
        over_seeds(curve[:, -1].tolist()),
        over_seeds(curve.max(axis=1).tolist()),
        over_seeds([area(seed) for seed in curve.tolist()]),
    )


def by_trial(curve: np.ndarray) -> list[Interval]:
    """Return the mean over seeds of each trial, with its interval."""
    return [over_seeds(values) for values in curve.T.tolist()]


def _mean(tasks: Mapping[int, float], groups: Groups) -> float:
    parts = [[tasks[index] for index in indices if index in tasks] for indices in groups.values()]
    return float(np.mean([np.mean(part) for part in parts if part])) if any(parts) else np.nan


def _solved(trials: Sequence[Sequence[Result]], success_return: float) -> np.ndarray:
    """Return bool [trials, tasks * samples]: each sample counts as a task of its own; a failed one is not solved."""
    keys = sorted({(result.index, result.sample) for results in trials for result in results})
    solved = np.zeros((len(trials), len(keys)), bool)
    for trial, results in enumerate(trials):
        for result in results:
            if result.return_ is not None:
                solved[trial, keys.index((result.index, result.sample))] = result.return_ >= success_return
    return solved
