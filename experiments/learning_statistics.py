"""Intervals over seeds and houses, the exact test of paired seeds, and curves over steps."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import permutation_test

from empo2.recipe.evaluation.statistics import Interval

RESAMPLES = 10_000

type Curve = tuple[np.ndarray, np.ndarray]
"""Steps [n] and values [n]."""


def over_seeds_and_houses(values: np.ndarray, *, same_houses: bool = False) -> Interval:
    """Return the mean of a measurement and its 95 % percentile bootstrap interval, which lies within the values' range.

    Seeds are drawn with replacement, and houses within each of them; of houses that all seeds share, the same are drawn
    for all. Equal values give equal intervals.

    Args:
        values: [seeds, houses], such as shares of episodes that succeeded, or differences of them between two arms.
        same_houses: whether a column is one house.
    """
    seeds, houses = values.shape
    generator = np.random.default_rng(0)
    rows = generator.integers(seeds, size=(RESAMPLES, seeds, 1))
    columns = generator.integers(houses, size=(RESAMPLES, 1 if same_houses else seeds, houses))
    means = values[rows, columns].mean(axis=(1, 2))
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


def p_of_pairs(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the mean of paired differences: exact, over all signs that they could have.

    n pairs cannot reach less than 2 / 2^n.
    """
    if len(differences) == 1:
        return 1.0  # of both signs alike; scipy wants two pairs
    zeros = np.zeros(len(differences))
    found = permutation_test(
        (np.asarray(differences), zeros),
        lambda a, b, axis: (a - b).mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2 ** len(differences),
    )
    return float(found.pvalue)


def curve(rows: Sequence[Mapping[str, float]], metric: str, against: str = "step") -> Curve:
    """Return a metric of one run against its steps, or against another metric."""
    points = [(row[against], row[metric]) for row in rows if metric in row]
    return np.array([x for x, _ in points]), np.array([y for _, y in points])


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of several runs' curves at the points in their order that all of them have."""
    length = min(len(x) for x, _ in curves)
    return np.mean([x[:length] for x, _ in curves], axis=0), np.mean([y[:length] for _, y in curves], axis=0)


def first_reach(points: Curve, height: float) -> float:
    """Return where a curve is first measured at `height` or above; nan if it never is."""
    places, values = points
    reached = places[values >= height]
    return float(reached[0]) if len(reached) else math.nan


def over_blocks(points: Curve, block: int) -> Curve:
    """Return the means of a curve over blocks of steps, each at its last step."""
    steps, values = (part[: len(part) // block * block].reshape(-1, block) for part in points)
    return steps[:, -1], values.mean(axis=1)
