"""Put EMPO²'s advantages and mode flags on agent-lightning's training rows."""

from collections.abc import Mapping

import torch
from verl import DataProto

from empo2.recipe.trainer.compat.agentlightning import GIVEN_ADVANTAGES
from empo2.recipe.trainer.step_results import RolloutResult


def set_advantages(batch: DataProto, results: Mapping[str, RolloutResult], advantages: Mapping[str, float]) -> None:
    """Put each rollout's advantage on the trained tokens of its rows, and flag off-policy rows; in place.

    Args:
        results: by rollout id.
        advantages: by rollout id.
    """
    ids = batch.non_tensor_batch["rollout_id_list"].tolist()
    rows = torch.tensor([advantages[rollout] for rollout in ids])
    batch.batch[GIVEN_ADVANTAGES] = rows.unsqueeze(-1) * batch.batch["response_mask"]
    batch.batch["off_policy"] = torch.tensor([results[rollout].mode.off_policy for rollout in ids])


def groups_without_gradient(batch: DataProto) -> float:
    """Return the fraction of groups in which no token has an advantage."""
    groups = batch.non_tensor_batch["data_id_list"]
    learning = groups[batch.batch[GIVEN_ADVANTAGES].any(-1).numpy()]
    return 1 - len(set(learning)) / len(set(groups))
