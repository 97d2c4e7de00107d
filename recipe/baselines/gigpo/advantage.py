"""The advantage of each turn among the turns of its group that began in the same state, beside its rollout's."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from empo2.recipe.config import Algorithm
from empo2.recipe.trainer.advantages import all_solved, compare_halves, equal_within_tolerance
from empo2.recipe.trainer.rows import Turn
from empo2.recipe.trainer.step_results import RolloutResult, StepResults, groups_of

_FEW_SHARED = 0.2


def warning(metrics: Mapping[str, float]) -> str:
    """Return one line if fewer than 20 % of the turns share their state; "" otherwise."""
    if (shared := metrics["gigpo/shared_turns"]) >= _FEW_SHARED:
        return ""
    return (
        f"WARNING: algorithm.advantage='gigpo': only {shared:.0%} of the turns began in a state that another turn "
        "of their group began in; does the newest message hold a step counter or the history?"
    )


def turn_advantages(results: StepResults, algorithm: Algorithm) -> tuple[dict[Turn, float], dict[str, float]]:
    """Return the advantage of each trained turn, and metrics: the clusters' mean size, and the turns that share theirs.

    A cluster has the turns of a group that began in the same state: the newest observation as the agent wrote it,
    without tips, which differ between rollouts; whitespace is collapsed. A turn without one is alone. Turns are
    compared as rollouts are, see `rollout_advantages`: the baseline of off-policy turns with tips is the mean of
    those without, if the cluster has some. Equal within the tolerance, or alone: 0. Where the rollouts of all turns
    that are compared succeeded, 1/n is left out, as in `compared_scores`; with ``intrinsic_advantage: plain`` it is
    added undivided.
    """
    kept, sizes = results.kept, list[int]()
    advantages: dict[Turn, float] = {}
    returns: dict[bool, dict[Turn, float]] = {True: {}, False: {}}  # with 1/n, and without
    plain = algorithm.intrinsic_advantage == "plain"

    def explores(turns: list[Turn]) -> bool:
        return not all_solved((kept[rollout] for rollout, _ in turns), algorithm)

    def scores(turns: list[Turn]) -> list[float]:
        with_1_n = not plain and explores(turns)
        return equal_within_tolerance([returns[with_1_n][turn] for turn in turns], algorithm)

    def novelty(turns: list[Turn]) -> list[float]:
        share = 1 / (algorithm.scale * algorithm.return_range)
        return [share * (returns[True][turn] - returns[False][turn]) if explores(turns) else 0.0 for turn in turns]

    for group in groups_of(kept):
        clusters: defaultdict[Any, dict[Turn, RolloutResult]] = defaultdict(dict)
        for rollout, result in group.items():
            turns, trained = results.turns(rollout), set(chain(*result.rows))
            for with_1_n, of_turns in returns.items():
                rewards = [turn.intrinsic if with_1_n else 0.0 for turn in turns]
                values = step_returns(result.return_, rewards, algorithm)
                of_turns |= {(rollout, turn.number): value for turn, value in zip(turns, values, strict=True)}
            for turn in turns:
                if turn.number in trained:
                    state = " ".join(turn.observation.split())
                    clusters[state or (rollout, turn.number)][rollout, turn.number] = result
        for cluster in clusters.values():
            sizes.append(len(cluster))
            compared = compare_halves(cluster, scores, algorithm.normalize_by_std)
            more = compare_halves(cluster, novelty, normalize_by_std=False) if plain else dict.fromkeys(cluster, 0.0)
            advantages |= {turn: compared[turn] + more[turn] for turn in cluster}
    shared = sum(size for size in sizes if size > 1)
    return advantages, {"gigpo/cluster_size_mean": sum(sizes) / len(sizes), "gigpo/shared_turns": shared / sum(sizes)}


def step_returns(return_: float, rewards: Sequence[float], algorithm: Algorithm) -> list[float]:
    """Return R_t = r_t + gigpo_discount * R_(t+1) of each turn of an episode, scaled.

    r_t is the turn's intrinsic reward, and the last turn's also by how much the return exceeds ``failure_return``. The
    discount pulls towards failure: a late success is worth less, a late failure is as bad as an early one.

    Args:
        return_: of the environment.
        rewards: 1/n of each turn; a request that was sent again is one.
    """
    returns: list[float] = []
    for reward in reversed(rewards):
        later = algorithm.gigpo_discount * returns[-1] if returns else return_ - algorithm.failure_return
        returns.append(algorithm.new_state_reward * reward + later)
    return [algorithm.scale * value for value in reversed(returns)]
