"""Means with 95 % intervals, paired differences, and the figures of a sequence of trials."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_LEVEL = 0.95
_RESAMPLES = 10_000
_SEED = 0  # equal data give equal intervals


class Interval(NamedTuple):
    """A mean and the bounds of its 95 % interval; the bounds are NaN if they cannot be told."""

    mean: float
    low: float
    high: float


def bootstrap(groups: Sequence[Sequence[float]]) -> Interval:
    """Return the mean of the groups' means with its bootstrap interval over tasks.

    Each group counts once, as in the paper's table, however many tasks it has. Tasks are drawn with replacement within
    their group, 10,000 times; the bounds are the percentiles 2.5 and 97.5 of the means (Efron and Tibshirani 1993,
    ch. 13). A task's samples are averaged before, since they are not independent of each other.

    Args:
        groups: for each group the means of its tasks. Groups without a task are left out; with none left, all is NaN.
            A group of one task varies by nothing; if all are, the bounds are NaN.
    """
    filled = [np.asarray(group, dtype=float) for group in groups if len(group)]
    if not filled:
        return Interval(np.nan, np.nan, np.nan)
    mean = float(np.mean([group.mean() for group in filled]))
    if max(map(len, filled)) < 2:
        return Interval(mean, np.nan, np.nan)
    generator = np.random.default_rng(_SEED)
    means = np.zeros(_RESAMPLES)
    for group in filled:
        means += group[generator.integers(len(group), size=(_RESAMPLES, len(group)))].mean(axis=1)
    low, high = np.quantile(means / len(filled), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(mean, float(low), float(high))


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean over seeds with Student's t interval; the bounds are NaN for one seed."""
    from scipy.stats import t

    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Interval(mean, np.nan, np.nan)
    reach = float(t.ppf((1 + _LEVEL) / 2, n - 1)) * float(np.std(values, ddof=1)) / n**0.5
    return Interval(mean, mean - reach, mean + reach)


def area(curve: Sequence[float]) -> float:
    """Return the area under values at equal distances (trapezoids) divided by its width, in the unit of the values."""
    return float(np.trapezoid(curve) / (len(curve) - 1)) if len(curve) > 1 else float(curve[0])


def cumulative_success(solved: np.ndarray) -> np.ndarray:
    """Return for each trial the share of tasks solved in it or in an earlier one (MemRL's CSR; without memory: pass@k).

    ``solved`` is bool [trials, tasks].
    """
    return np.logical_or.accumulate(solved, axis=0).mean(axis=1)


def forgetting(solved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each trial how many tasks were lost, and how many failed; MemRL's rate is their ratio.

    A task is lost if it fails in this trial and was solved in an earlier one. ``solved`` is bool [trials, tasks].
    """
    before = np.zeros_like(solved)
    before[1:] = np.logical_or.accumulate(solved, axis=0)[:-1]
    return (before & ~solved).sum(axis=1), (~solved).sum(axis=1)
