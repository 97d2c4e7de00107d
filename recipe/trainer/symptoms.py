"""Signs in the metrics of a run that tips do not teach the weights; docs/algorithm.md says why they come."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

STEPS = 20  # that are looked at together
_RISE = 1.25  # of the second half to the first
_GAP, _MASKED = 0.1, 0.01  # nats, and share of tokens, below which is noise
_IDLE, _AHEAD = 2 / 3, 0.2  # share of groups; of success with tips over that without
_PARTS = 3  # of a half: so many steps must have off-policy rows
_ALIKE = (
    "WARNING: memory.embedder cannot tell some states apart (gateway.log says why), so that novelty and retrieval take "
    "them for one: choose another (docs/states.md)"
)

type Metrics = Mapping[str, float]


class Symptoms:
    """The last steps of a run; each sign is told once."""

    def __init__(self) -> None:
        self._steps: deque[Metrics] = deque(maxlen=STEPS)
        self._told: set[str] = set()

    def seen(self, metrics: Metrics) -> list[str]:
        """Return what the last steps, this one included, warn of for the first time, a line each."""
        if "training/success_rate" not in metrics:  # a validation before the first step
            return []
        self._steps.append(metrics)
        signs = {"alike": _ALIKE if metrics.get("empo2/states_alike") else ""}
        if len(self._steps) == STEPS:
            steps = list(self._steps)
            signs |= {"drifts": drifts(steps), "idle": idle(steps)}
        new = {name: line for name, line in signs.items() if line and name not in self._told}
        self._told |= new.keys()
        return list(new.values())


def drifts(steps: Sequence[Metrics]) -> str:
    """Return one line if the gap of off-policy rows and their masked share rise together; "" otherwise."""
    halves = [steps[: len(steps) // 2], steps[len(steps) // 2 :]]
    # Distilled rows have no mask, and are what is advised.
    needed = {"empo2/off_policy/old_kl", "empo2/off_policy/masked"}
    rows = [[step for step in half if needed <= step.keys()] for half in halves]
    if min(map(len, rows)) < _PARTS:
        return ""
    gap, masked = (
        [float(np.mean([step[f"empo2/off_policy/{name}"] for step in half])) for half in rows]
        for name in ("old_kl", "masked")
    )
    if gap[1] < max(_RISE * gap[0], _GAP) or masked[1] < max(_RISE * masked[0], _MASKED):
        return ""
    return (
        f"WARNING: what tips teach does not reach the weights: within {len(steps)} steps off-policy rows went from "
        f"{gap[0]:.2f} to {gap[1]:.2f} nats (empo2/off_policy/old_kl) and from {100 * masked[0]:.1f} to "
        f"{100 * masked[1]:.1f} % masked tokens; algorithm.form=internalise imitates successes"
    )


def idle(steps: Sequence[Metrics]) -> str:
    """Return one line if most groups have no gradient while tips are what decides; "" otherwise."""
    share = float(np.mean([step["empo2/groups_without_gradient"] for step in steps]))
    with_tips, without = (
        [step[name] for step in steps if name in step]
        for name in ("training/memory_success_rate", "training/success_rate_without_memory")
    )
    if share < _IDLE or not with_tips or not without or np.mean(with_tips) - np.mean(without) < _AHEAD:
        return ""
    return (
        f"WARNING: {100 * share:.0f} % of the groups of the last {len(steps)} steps had no gradient, while rollouts "
        f"with tips succeed in {100 * np.mean(with_tips):.0f} % and those without in {100 * np.mean(without):.0f} %; "
        "algorithm.baseline=paired compares them with each other, algorithm.form=internalise also imitates successes"
    )
