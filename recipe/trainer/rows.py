"""Drop agent-lightning's training rows that are too long; set exact scores, advantages and mode flags on the rest."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from verl import DataProto

from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.trainer.compat.agentlightning import GIVEN_ADVANTAGES
from empo2.recipe.trainer.step_results import RolloutResult


def drop_overlong(batch: DataProto) -> DataProto:
    """Drop rows whose prompt exceeds the limit, then rollouts that are left alone in their group.

    verl's grpo would use the score of a lone rollout as its advantage (mean 0, std 1).

    Raises:
        NoUsableRollouts: no row is left.
    """
    fits = (~batch.batch["is_drop_mask"]).tolist()
    row_groups, row_rollouts = batch.non_tensor_batch["data_id_list"], batch.non_tensor_batch["rollout_id_list"]
    groups: dict[str, set[str]] = defaultdict(set)
    for row in range(len(batch)):
        if fits[row]:
            groups[row_groups[row]].add(row_rollouts[row])
    kept = [row for row in range(len(batch)) if fits[row] and len(groups[row_groups[row]]) > 1]
    if not kept:
        raise NoUsableRollouts("no two rollouts of a task have prompts within model.max_prompt_tokens")
    return batch.select_idxs(kept)


def set_scores(
    batch: DataProto,
    results: Mapping[str, RolloutResult],
    scores: Mapping[str, float],
    advantages: Mapping[str, float],
) -> None:
    """Put each rollout's score on the last token of its rows and its advantage on all, and flag off-policy rows.

    The batch is changed in place.

    agent-lightning's adapter has rounded the returns to bfloat16, which keeps three digits.

    Args:
        results: by rollout id.
        scores: by rollout id, from `training_scores`.
        advantages: by rollout id, from `rollout_advantages`.
    """
    ids = batch.non_tensor_batch["rollout_id_list"].tolist()
    length = batch.batch["token_level_scores"].shape[-1]
    ends = batch.batch["attention_mask"][:, -length:].sum(-1) - 1
    exact = torch.zeros(len(batch), length)
    exact[torch.arange(len(batch)), ends] = torch.tensor([scores[rollout] for rollout in ids])
    batch.batch["token_level_scores"] = exact
    rows = torch.tensor([advantages[rollout] for rollout in ids])
    batch.batch[GIVEN_ADVANTAGES] = rows.unsqueeze(-1) * batch.batch["response_mask"]
    batch.batch["off_policy"] = torch.tensor([results[rollout].mode.off_policy for rollout in ids])


def groups_without_gradient(batch: DataProto) -> float:
    """Return the fraction of groups in which no token has an advantage."""
    groups = batch.non_tensor_batch["data_id_list"]
    learning = groups[batch.batch[GIVEN_ADVANTAGES].any(-1).numpy()]
    return 1 - len(set(learning)) / len(set(groups))
