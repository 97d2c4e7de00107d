"""The scores by which the rollouts of a group are compared."""

from collections.abc import Mapping, Sequence

from empo2.recipe.config import Algorithm
from empo2.recipe.protocol import scaled_return
from empo2.recipe.trainer.step_results import RolloutResult, groups_of


def training_scores(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> dict[str, float]:
    """Return the score of each rollout, compared with its group; see `compared_scores`.

    Args:
        results: by rollout id.
    """
    scores: dict[str, float] = {}
    for rollouts in groups_of(results):
        scores |= zip(rollouts, compared_scores([results[rollout] for rollout in rollouts], algorithm), strict=True)
    return scores


def compared_scores(results: Sequence[RolloutResult], algorithm: Algorithm) -> list[float]:
    """Return the scores of rollouts that are compared with each other: scaled return and intrinsic reward.

    The advantage divides by the standard deviation, so any spread, however small, becomes advantages of about ±1. Two
    rules keep noise from being learned [ours]:

    - if every rollout succeeded, the intrinsic reward is left out: there is nothing left to explore, and it would
      favor longer episodes;
    - if the scores differ by less than ``return_tolerance`` (a share of the returns' range), they count as equal, and
      no rollout has an advantage.
    """
    solved = all(result.return_ >= algorithm.success_return for result in results)
    scores = [scaled_return(algorithm, result.return_, 0.0 if solved else result.intrinsic) for result in results]
    return equal_within_tolerance(scores, algorithm)


def equal_within_tolerance(scores: list[float], algorithm: Algorithm) -> list[float]:
    """Return the scores, or their mean for each if they differ by less than ``return_tolerance``."""
    if max(scores) - min(scores) < algorithm.scale * algorithm.tolerance:
        return [sum(scores) / len(scores)] * len(scores)
    return scores


def tolerance_warning(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> str:
    """Return one line on a step without any gradient whose returns differ within a group; "" where they do not."""
    returns = [[results[rollout].return_ for rollout in rollouts] for rollouts in groups_of(results)]
    spread = max(max(group) - min(group) for group in returns)
    if spread == 0:
        return ""
    return (
        f"WARNING: no group has a gradient: returns differ by up to {spread:.3g} within a group, but with the "
        f"intrinsic reward by less than algorithm.return_tolerance={algorithm.return_tolerance:g} of the range "
        f"{algorithm.failure_return:g} to {algorithm.success_return:g}; lower it if such differences matter"
    )


def range_warning(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> str:
    """Return one line if a return lies outside the range that the intrinsic reward is a share of; "" otherwise."""
    returns = [result.return_ for result in results.values()]
    if algorithm.failure_return <= min(returns) and max(returns) <= algorithm.success_return:
        return ""
    return (
        f"WARNING: returns are {min(returns):.3g} to {max(returns):.3g}, outside of algorithm.failure_return="
        f"{algorithm.failure_return:g} to success_return={algorithm.success_return:g}; give both, since the intrinsic "
        "reward and the tolerance are shares of this range"
    )
