"""The score of each rollout, and its advantage relative to its group; docs/algorithm.md has the rules."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np

from empo2.recipe.config import Algorithm
from empo2.recipe.protocol import is_success, scaled_return
from empo2.recipe.trainer.step_results import Results, RolloutResult, groups_of

_EPSILON = 1e-6  # verl's
_ROUNDING = 1e-6  # share of the tolerance; half the reward of a new state, its default, is a difference that occurs
_LARGEST = 1e20  # of an advantage that is not divided: what the loss multiplies it by leaves it a float32


def compared_scores(results: Sequence[RolloutResult], algorithm: Algorithm) -> list[float]:
    """Return the scores of rollouts that are compared with each other: scaled return and intrinsic reward.

    The advantage divides by the standard deviation, so any spread, however small, becomes advantages of about ±1. Two
    rules keep noise from being learned [ours]:

    - if every rollout succeeded, the intrinsic reward is left out: there is nothing left to explore, and it would
      favor longer episodes;
    - if the scores differ by less than ``return_tolerance`` (a share of the returns' range), they count as equal, and
      no rollout has an advantage.
    """
    solved = all_solved(results, algorithm)
    scores = [scaled_return(algorithm, result.return_, 0.0 if solved else result.intrinsic) for result in results]
    return equal_within_tolerance(scores, algorithm)


def all_solved(results: Iterable[RolloutResult], algorithm: Algorithm) -> bool:
    """Return whether all rollouts that are compared with each other succeeded, so that 1/n is left out."""
    return all(is_success(result.return_, algorithm.success_return) for result in results)


def equal_within_tolerance(scores: list[float], algorithm: Algorithm) -> list[float]:
    """Return the scores, or the first of them for each if they differ by less than ``return_tolerance``."""
    if max(scores) - min(scores) < algorithm.scale * algorithm.tolerance * (1 - _ROUNDING):
        return scores[:1] * len(scores)
    return scores


def rollout_advantages(results: Results, algorithm: Algorithm) -> dict[str, float]:
    """Return the advantage of each rollout, by its id.

    - Rollouts of one mode are compared with each other: (score - mean) / std, as in GRPO.
    - Off-policy rollouts with tips, in a group that also has rollouts without: their baseline is the mean of those
      without, and the standard deviation is that of both together.

    With ``intrinsic_advantage: plain`` the intrinsic reward is no part of the score; what it exceeds its baseline by is
    added to the advantage as it is, so that where all returns are equal it does not weigh as much as a success [ours].

    It is 0 for all rollouts of a comparison whose scores are equal, and for a rollout compared with none.
    """
    plain = algorithm.intrinsic_advantage == "plain"
    outside = algorithm.model_copy(update={"intrinsic_coefficient": 0.0}) if plain else algorithm

    def of(rollouts: Sequence[str]) -> list[RolloutResult]:
        return [results[rollout] for rollout in rollouts]

    advantages: dict[str, float] = {}
    for group in groups_of(results):
        advantages |= compare_halves(group, lambda each: compared_scores(of(each), outside), algorithm.normalize_by_std)
        if plain:
            novelty = compare_halves(group, lambda each: novelty_scores(of(each), algorithm), normalize_by_std=False)
            advantages |= {rollout: advantages[rollout] + novelty[rollout] for rollout in group}
    return advantages


def novelty_scores(results: Sequence[RolloutResult], algorithm: Algorithm) -> list[float]:
    """Return the intrinsic rewards of rollouts that are compared with each other, 0 if every rollout succeeded."""
    solved = all_solved(results, algorithm)
    return [0.0 if solved else algorithm.intrinsic_coefficient * result.intrinsic for result in results]


def compare_halves[T: Hashable](
    members: Mapping[T, RolloutResult], scores: Callable[[list[T]], list[float]], normalize_by_std: bool
) -> dict[T, float]:
    """Return the advantages of members of a group, each with its rollout, by the rules of `rollout_advantages`."""
    advantages: dict[T, float] = {}
    without = [member for member, rollout in members.items() if not rollout.mode.memory]
    for half in (without, [member for member, rollout in members.items() if rollout.mode.memory]):
        if half:
            others = without if members[half[0]].mode.off_policy else []
            compared = scores([*others, *half])
            own = relative_to(compared[: len(others)] or compared, compared, normalize_by_std)[len(others) :]
            advantages |= zip(half, own.tolist(), strict=True)
    return advantages


def relative_to(baseline: Sequence[float], scores: Sequence[float], normalize_by_std: bool) -> np.ndarray:
    """Return (scores - mean of the baseline) / std of the scores, [scores]; exactly 0 where all scores are equal.

    The standard deviation has Bessel's correction; without ``normalize_by_std`` it is 1. Scores may be as large as a
    float can be: they are divided by the largest first, since their sum and their squares would be infinite.
    """
    largest = np.finfo(np.float64).max  # which a return times the scale may exceed
    values, mean_of = (np.clip(np.asarray(each, np.float64), -largest, largest) for each in (scores, baseline))
    if values.max() == values.min():
        return np.zeros(len(values))
    size = max(1.0, float(np.abs(values).max()))
    differences = values / size - np.mean(mean_of / size)
    if normalize_by_std:
        return differences / ((values / size).std(ddof=1) + _EPSILON / size)
    return np.clip(differences, -_LARGEST / size, _LARGEST / size) * size


def worth_imitating(results: Results, algorithm: Algorithm) -> set[str]:
    """Return the off-policy rollouts that are distilled: what they did with tips is to be done without.

    They succeeded, or their return exceeds the mean of their group's rollouts without tips, or of the whole group if
    there are none, by more than ``return_tolerance``. The intrinsic reward is not part of it.
    """
    chosen: set[str] = set()
    for group in groups_of(results):
        without = [member.return_ for member in group.values() if not member.mode.memory]
        returns = [member.return_ for member in group.values()]
        least = algorithm.tolerance * (1 + _ROUNDING)
        above = relative_to(without or returns, returns, normalize_by_std=False) > least
        for (rollout, member), better in zip(group.items(), above, strict=True):
            if member.mode.off_policy and (better or is_success(member.return_, algorithm.success_return)):
                chosen.add(rollout)
    return chosen


def tip_gain(results: Results, algorithm: Algorithm) -> float | None:
    """Return what tips are worth: the mean scaled return with tips minus that without, averaged over paired groups.

    The intrinsic reward is not part of it. None if no group has rollouts of both kinds.
    """
    gains = []
    for group in groups_of(results):
        with_tips, without = (
            [scaled_return(algorithm, each.return_) for each in group.values() if each.mode.memory == memory]
            for memory in (True, False)
        )
        if with_tips and without:
            gains.append(np.mean(with_tips) - np.mean(without))
    return float(np.mean(gains)) if gains else None


def tolerance_warning(results: Results, algorithm: Algorithm) -> str:
    """Return one line on a step without any gradient whose returns differ within a group; "" where they do not."""
    returns = [[result.return_ for result in group.values()] for group in groups_of(results)]
    spread = max(max(group) - min(group) for group in returns)
    if spread == 0:
        return ""
    return (
        f"WARNING: no group has a gradient: returns differ by up to {spread:.3g} within a group, but with the "
        f"intrinsic reward by less than algorithm.return_tolerance={algorithm.return_tolerance:g} of the range "
        f"{algorithm.failure_return:g} to {algorithm.success_return:g}; lower it if such differences matter"
    )


def range_warning(results: Results, algorithm: Algorithm) -> str:
    """Return one line if a return lies outside the range that the intrinsic reward is a share of; "" otherwise."""
    returns = [result.return_ for result in results.values()]
    if algorithm.failure_return <= min(returns) and max(returns) <= algorithm.success_return:
        return ""
    return (
        f"WARNING: returns are {min(returns):.3g} to {max(returns):.3g}, outside of algorithm.failure_return="
        f"{algorithm.failure_return:g} to success_return={algorithm.success_return:g}; give both, since the intrinsic "
        "reward and the tolerance are shares of this range"
    )
