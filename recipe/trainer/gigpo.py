"""GiGPO (arXiv 2505.10978): the advantage of each turn among the turns of its group that began in the same state."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from agentlightning.verl.agl_rollout_manager import CompletedRollout
from agentlightning.verl.rollout_adapter import ids_startswith
from verl import DataProto

from empo2.recipe.config import Algorithm
from empo2.recipe.messages import anchor_of
from empo2.recipe.protocol import RolloutTag
from empo2.recipe.trainer.advantages import compare_halves
from empo2.recipe.trainer.compat.agentlightning import GIVEN_ADVANTAGES
from empo2.recipe.trainer.scores import equal_within_tolerance
from empo2.recipe.trainer.step_results import RolloutResult, Turn, groups_of, trained_turns

TURN_ID = "turn_id"  # key of a batch: the turn of each trained token, -1 elsewhere, [rows, tokens]

type StepAdvantages = Mapping[str, Mapping[int, float]]
"""By rollout id and number of the turn."""

_FEW_SHARED = 0.2


def rows_of_turns(rollout: CompletedRollout) -> list[list[Turn]]:
    """Return the turns of each row that agent-lightning's adapter makes of a rollout, in its order.

    The adapter merges a turn into the row before it if its prompt begins with all tokens of that row.

    Args:
        rollout: as it was played, with its events.
    """
    sent = {} if RolloutTag.read(rollout.metadata) else _anchors_of_requests(rollout)
    rows: list[list[Turn]] = []
    context: list[int] | None = None
    for number, (triplet, call) in enumerate(trained_turns(rollout)):
        if triplet is None:
            continue
        prompt, reply = triplet.prompt["token_ids"], triplet.response["token_ids"]
        anchor = (call.anchor if call else sent.get(tuple(prompt))) or ""
        if context is None or not ids_startswith(prompt, context):
            rows.append([])
        rows[-1].append(Turn(number, anchor, len(reply)))
        context = prompt + reply
    return rows


def _anchors_of_requests(rollout: CompletedRollout) -> dict[tuple[int, ...], str]:
    """Return the anchors of an untagged rollout's calls by prompt; they were sent as the agent wrote them."""
    anchors = {}
    for event in rollout.events:
        if event["event_type"] == "model_request":
            request, response = event["data"].get("request") or {}, event["data"].get("response") or {}
            prompt = response.get("prompt_token_ids") or (response.get("choices") or [{}])[0].get("prompt_token_ids")
            anchors[tuple(prompt or ())] = anchor_of(request.get("messages") or [])
    return anchors


def set_turn_ids(batch: DataProto, results: Mapping[str, RolloutResult]) -> None:
    """Put the turn of each trained token beside ``response_mask``, in place.

    Args:
        batch: all rows of the adapter.
        results: of their rollouts, by id.
    """
    mask = batch.batch["response_mask"].bool()
    ids = torch.full(mask.shape, -1, dtype=torch.long)
    ahead = {rollout: iter(result.rows) for rollout, result in results.items()}
    for row, rollout in enumerate(batch.non_tensor_batch["rollout_id_list"].tolist()):
        turns = [turn.number for turn in next(ahead[rollout]) for _ in range(turn.tokens)]
        ids[row, mask[row]] = torch.tensor(turns[: int(mask[row].sum())])  # the rest lies beyond the end of the row
    batch.batch[TURN_ID] = ids


def step_returns(result: RolloutResult, algorithm: Algorithm, *, solved: bool) -> list[float]:
    """Return R_t, the scaled, discounted return from each turn of an episode on: r_t plus the discounted R of t + 1.

    The environment's return is the last turn's reward, 1/n that of each turn.

    Args:
        solved: True if all rollouts of the group succeeded; then 1/n is left out, as in `compared_scores`.
    """
    rewards = [0.0 if solved else algorithm.new_state_reward * reward for reward in result.turn_rewards]
    returns: list[float] = []
    later = result.return_
    for number, reward in enumerate(reversed(rewards)):
        later = reward + (later if number == 0 else algorithm.gigpo_discount * later)
        returns.append(later * algorithm.scale)
    return returns[::-1]


def step_advantages(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> StepAdvantages:
    """Return the advantage of each trained turn within its cluster: the turns of a group with an equal anchor.

    Turns are compared as rollouts are, see `rollout_advantages`: the baseline of off-policy turns with tips is the mean
    of those without, if the cluster has some. Equal within the tolerance, or alone: 0.
    """
    advantages: dict[str, dict[int, float]] = {rollout: {} for rollout in results}
    for cluster in clusters(results):
        group = [other for other in results.values() if other.group == results[cluster[0][0]].group]
        solved = all(result.return_ >= algorithm.success_return for result in group)
        values = {
            (rollout, turn): step_returns(results[rollout], algorithm, solved=solved)[turn] for rollout, turn in cluster
        }
        made = compare_halves(
            cluster,
            lambda member: results[member[0]].mode,
            lambda compared, values=values: equal_within_tolerance([values[turn] for turn in compared], algorithm),
            algorithm.normalize_by_std,
        )
        for (rollout, turn), advantage in made.items():
            advantages[rollout][turn] = advantage
    return advantages


def clusters(results: Mapping[str, RolloutResult]) -> list[list[tuple[str, int]]]:
    """Return (rollout id, number of the turn) of the trained turns in each state; one without anchor is alone."""
    found: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for group, rollouts in enumerate(groups_of(results)):
        for rollout in rollouts:
            for turn in (turn for row in results[rollout].rows for turn in row):
                alone = () if turn.anchor else (rollout, str(turn.number))
                found[str(group), turn.anchor, *alone].append((rollout, turn.number))
    return list(found.values())


def add_step_advantages(batch: DataProto, steps: StepAdvantages, weight: float) -> None:
    """Add ω times the advantage of its turn to each trained token's advantage, in place."""
    added = torch.zeros_like(batch.batch[GIVEN_ADVANTAGES])
    turn_ids = batch.batch.pop(TURN_ID)
    for row, rollout in enumerate(batch.non_tensor_batch["rollout_id_list"].tolist()):
        for turn, advantage in steps[rollout].items():
            added[row, turn_ids[row] == turn] = advantage
    batch.batch[GIVEN_ADVANTAGES] = batch.batch[GIVEN_ADVANTAGES] + weight * added


def cluster_metrics(found: Sequence[Sequence[tuple[str, int]]]) -> dict[str, float]:
    """Return the mean size of clusters, and the fraction of turns that share theirs with another turn."""
    turns = sum(map(len, found))
    return {
        "gigpo/cluster_size_mean": turns / len(found),
        "gigpo/shared_turns": sum(len(cluster) for cluster in found if len(cluster) > 1) / turns,
    }


def sharing_warning(metrics: Mapping[str, float]) -> str:
    """Return one line if fewer than 20 % of the turns share their state; "" otherwise."""
    if (shared := metrics["gigpo/shared_turns"]) >= _FEW_SHARED:
        return ""
    return (
        f"WARNING: algorithm.advantage='gigpo': only {shared:.0%} of the turns began in a state that another turn of "
        "their group began in; does the newest message hold a step counter or the history?"
    )
