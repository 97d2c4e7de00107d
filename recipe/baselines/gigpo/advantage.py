"""The advantage of each turn among the turns of its group that began in the same state, beside its rollout's."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from agentlightning.verl.agl_rollout_manager import CompletedRollout
from verl import DataProto

from empo2.recipe.config import Algorithm
from empo2.recipe.trainer.advantages import compare_halves, equal_within_tolerance
from empo2.recipe.trainer.compat.agentlightning import GIVEN_ADVANTAGES
from empo2.recipe.trainer.rollout_calls import PlayedCall, calls_of
from empo2.recipe.trainer.rows import turns_of_rows
from empo2.recipe.trainer.step_results import RolloutResult, groups_of, trained_rows

_FEW_SHARED = 0.2


class TurnAdvantages:
    """The advantages of a step's turns.

    Args:
        played: the step's rollouts, with their events; those that are not trained have no rows in a batch.
        max_prompt_tokens: of a row's prompt.
    """

    def __init__(
        self, algorithm: Algorithm, played: Iterable[CompletedRollout], max_prompt_tokens: float = math.inf
    ) -> None:
        self._algorithm = algorithm
        self._rows: dict[str, list[list[PlayedCall]]] = {}  # the turns of each row
        self._rewards: dict[str, list[float]] = {}  # 1/n of all answered calls
        for rollout in played:
            self._rows[rollout.rollout_id] = trained_rows(rollout, max_prompt_tokens)
            self._rewards[rollout.rollout_id] = [call.intrinsic for call in calls_of(rollout.events) if call.reply]

    def add(self, batch: DataProto, results: Mapping[str, RolloutResult]) -> dict[str, float]:
        """Add the advantage of its turn to that of each trained token, in place.

        Args:
            batch: all rows of the adapter.
            results: of the batch's rollouts, by id.

        Returns:
            The mean size of clusters, and the fraction of turns that share theirs with another turn.
        """
        advantages, sizes = self.of(results)
        mask = batch.batch["response_mask"].bool()
        rollouts = batch.non_tensor_batch["rollout_id_list"].tolist()
        for row, turns in turns_of_rows(batch, self._rows):
            added = [advantages[rollouts[row], turn.number] for turn in turns for _ in turn.reply]
            tokens = int(mask[row].sum())  # what there are more lies beyond the row's end
            batch.batch[GIVEN_ADVANTAGES][row, mask[row]] += torch.tensor(added[:tokens])
        shared = sum(size for size in sizes if size > 1)
        return {"gigpo/cluster_size_mean": sum(sizes) / len(sizes), "gigpo/shared_turns": shared / sum(sizes)}

    @staticmethod
    def warning(metrics: Mapping[str, float]) -> str:
        """Return one line if fewer than 20 % of the turns share their state; "" otherwise."""
        if (shared := metrics["gigpo/shared_turns"]) >= _FEW_SHARED:
            return ""
        return (
            f"WARNING: algorithm.advantage='gigpo': only {shared:.0%} of the turns began in a state that another turn "
            "of their group began in; does the newest message hold a step counter or the history?"
        )

    def of(self, results: Mapping[str, RolloutResult]) -> tuple[dict[tuple[str, int], float], list[int]]:
        """Return the advantage of each turn, by rollout id and number, and the sizes of the clusters.

        A cluster has the turns of a group that began in the same state: the newest observation as the agent wrote it,
        without tips, which differ between rollouts; whitespace is collapsed. A turn without one is alone. Turns are
        compared as rollouts are, see `rollout_advantages`: the baseline of off-policy turns with tips is the mean of
        those without, if the cluster has some. Equal within the tolerance, or alone: 0.
        """
        algorithm, sizes = self._algorithm, list[int]()
        advantages: dict[tuple[str, int], float] = {}
        for group in groups_of(results):
            solved = all(results[rollout].return_ >= algorithm.success_return for rollout in group)
            returns: dict[tuple[str, int], float] = {}
            clusters: defaultdict[Any, list[tuple[str, int]]] = defaultdict(list)
            for rollout in group:  # in a solved group 1/n is left out, as in `compared_scores`
                rewards = [0.0 if solved else reward for reward in self._rewards[rollout]]
                of_turns = step_returns(results[rollout].return_, rewards, algorithm)
                for turn in chain(*self._rows[rollout]):
                    returns[rollout, turn.number] = of_turns[turn.number]
                    state = " ".join(turn.observation.split())
                    clusters[state or (rollout, turn.number)].append((rollout, turn.number))
            for cluster in clusters.values():
                sizes.append(len(cluster))
                advantages |= compare_halves(
                    cluster,
                    lambda turn: results[turn[0]].mode,
                    lambda turns, of=returns: equal_within_tolerance([of[turn] for turn in turns], algorithm),
                    algorithm.normalize_by_std,
                )
        return advantages, sizes


def step_returns(return_: float, rewards: Sequence[float], algorithm: Algorithm) -> list[float]:
    """Return R_t = r_t + gigpo_discount * R_(t+1) of each turn of an episode, scaled.

    r_t is the turn's intrinsic reward, and the last turn's also by how much the return exceeds ``failure_return``. The
    discount pulls towards failure: a late success is worth less, a late failure is as bad as an early one.

    Args:
        return_: of the environment.
        rewards: 1/n of each turn.
    """
    returns: list[float] = []
    for reward in reversed(rewards):
        later = algorithm.gigpo_discount * returns[-1] if returns else return_ - algorithm.failure_return
        returns.append(algorithm.new_state_reward * reward + later)
    return [algorithm.scale * value for value in reversed(returns)]
