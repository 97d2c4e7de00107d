"""The scores by which the rollouts of a group are compared."""

import math
from collections import defaultdict
from collections.abc import Mapping

from empo2.recipe.config import Algorithm
from empo2.recipe.protocol import scaled_return
from empo2.recipe.trainer.results import RolloutResult


def training_scores(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> dict[str, float]:
    """Return each rollout's score: its scaled return and intrinsic reward, or equal scores for a nearly equal group.

    The advantage divides by the group's standard deviation, so any spread, however small, becomes advantages of about
    ±1. Two rules keep noise from being learned [ours]:

    - if every rollout of a group succeeded, the intrinsic reward is left out: there is nothing left to explore, and it
      would favor longer episodes;
    - if the scores of a group differ by less than ``return_tolerance`` (in units of the environment's return), they
      count as equal, and no rollout of the group has an advantage.

    Args:
        results: by rollout id.
    """
    scores: dict[str, float] = {}
    for rollouts in _groups(results):
        solved = all(results[rollout].return_ >= algorithm.success_return for rollout in rollouts)
        group = {
            rollout: scaled_return(algorithm, results[rollout].return_, 0.0 if solved else results[rollout].intrinsic)
            for rollout in rollouts
        }
        if max(group.values()) - min(group.values()) < algorithm.return_scale * algorithm.return_tolerance:
            group = dict.fromkeys(rollouts, _short(sum(group.values()) / len(group)))
        scores |= group
    return scores


def groups_without_gradient(scores: Mapping[str, float], results: Mapping[str, RolloutResult]) -> float:
    """Return the fraction of groups in which all scores are equal, so that no rollout has an advantage.

    Args:
        scores: of `training_scores`, by rollout id.
        results: of the same rollouts.
    """
    equal = [len({scores[rollout] for rollout in rollouts}) == 1 for rollouts in _groups(results)]
    return sum(equal) / len(equal)


def tolerance_warning(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> str:
    """Return one line on a step without any gradient whose returns differ within a group; "" where they do not."""
    returns = [[results[rollout].return_ for rollout in rollouts] for rollouts in _groups(results)]
    spread = max(max(group) - min(group) for group in returns)
    if spread == 0:
        return ""
    return (
        f"WARNING: no group has a gradient: returns differ by up to {spread:.3g} within a group, but with the "
        f"intrinsic reward by less than algorithm.return_tolerance={algorithm.return_tolerance:g}; lower it if such "
        "differences matter"
    )


def _groups(results: Mapping[str, RolloutResult]) -> list[list[str]]:
    """Return the rollout ids of each group."""
    groups: dict[str, list[str]] = defaultdict(list)
    for rollout, result in results.items():
        groups[result.group].append(rollout)
    return list(groups.values())


def _short(value: float) -> float:
    """Round to 12 significant bits, so that verl's float32 mean of equal scores is exactly that score."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 4096) / 4096, exponent)
