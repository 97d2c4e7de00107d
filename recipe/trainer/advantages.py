"""The advantage of each rollout, relative to its group; docs/algorithm.md has the rules."""

from collections.abc import Mapping, Sequence

import numpy as np

from empo2.recipe.config import Algorithm
from empo2.recipe.protocol import scaled_return
from empo2.recipe.trainer.results import RolloutResult
from empo2.recipe.trainer.scores import compared_scores, groups_of

_EPSILON = 1e-6  # verl's


def rollout_advantages(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> dict[str, float]:
    """Return the advantage of each rollout.

    - Rollouts of one mode are compared with each other: (score - mean) / std, as in GRPO.
    - Off-policy rollouts with tips, in a group that also has rollouts without: their baseline is the mean of those
      without, and the standard deviation is that of both together.

    Args:
        results: by rollout id.

    Returns:
        By rollout id; 0 for all rollouts of a comparison whose scores are equal, and for a rollout compared with none.
    """
    advantages: dict[str, float] = {}
    for rollouts in groups_of(results):
        without, with_tips = _by_memory(rollouts, results)
        for members in filter(None, (without, with_tips)):
            paired = results[members[0]].mode.off_policy
            others = without if paired else []
            scores = compared_scores([results[rollout] for rollout in [*others, *members]], algorithm)
            own = relative_to(scores[: len(others)] or scores, scores, algorithm.normalize_by_std)[len(others) :]
            advantages |= zip(members, own.tolist(), strict=True)
    return advantages


def relative_to(baseline: Sequence[float], scores: Sequence[float], normalize_by_std: bool) -> np.ndarray:
    """Return (scores - mean of the baseline) / std of the scores, [scores]; exactly 0 where all scores are equal.

    The standard deviation has Bessel's correction; without ``normalize_by_std`` it is 1.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.max() == values.min():
        return np.zeros(len(values))
    return (values - np.mean(baseline)) / (values.std(ddof=1) + _EPSILON if normalize_by_std else 1.0)


def tip_gain(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> float | None:
    """Return what tips are worth: the mean scaled return with tips minus that without, averaged over paired groups.

    The intrinsic reward is not part of it. None if no group has rollouts of both kinds.
    """
    gains = []
    for rollouts in groups_of(results):
        without, with_tips = _by_memory(rollouts, results)
        if without and with_tips:
            means = (
                np.mean([scaled_return(algorithm, results[rollout].return_) for rollout in half])
                for half in (with_tips, without)
            )
            gains.append(next(means) - next(means))
    return float(np.mean(gains)) if gains else None


def groups_without_gradient(advantages: Mapping[str, float], results: Mapping[str, RolloutResult]) -> float:
    """Return the fraction of groups none of whose rollouts has an advantage."""
    flat = [not any(advantages[rollout] for rollout in rollouts) for rollouts in groups_of(results)]
    return sum(flat) / len(flat)


def _by_memory(rollouts: Sequence[str], results: Mapping[str, RolloutResult]) -> tuple[list[str], list[str]]:
    """Return the rollouts without tips and those with tips."""
    return (
        [rollout for rollout in rollouts if not results[rollout].mode.memory],
        [rollout for rollout in rollouts if results[rollout].mode.memory],
    )
