"""Put EMPO²'s advantages and mode flags on agent-lightning's training rows, and note what was trained of a call."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from verl import DataProto

from empo2.recipe.rollout_log import CallRow
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


def add_masks(
    calls: Sequence[CallRow],
    results: Mapping[str, RolloutResult],
    batch: DataProto,
    masked: torch.Tensor,
    known: torch.Tensor,
) -> None:
    """Note in the calls which tokens of their replies were trained, and which of these were masked; in place.

    Args:
        results: by rollout id.
        batch: all rows of the adapter.
        masked: [rows, tokens], bool.
        known: [rows], bool; whether that is known of a row.
    """
    answered: dict[str, list[CallRow]] = {}
    for call in calls:
        if len(call.get("response_ids", ())):
            answered.setdefault(call["rollout"], []).append(call)
    ahead = {rollout: iter(result.rows) for rollout, result in results.items()}
    for row, rollout in enumerate(batch.non_tensor_batch["rollout_id_list"].tolist()):
        flags = masked[row][batch.batch["response_mask"][row].bool()].numpy()
        for number in next(ahead[rollout]):
            call = answered[rollout][number]
            own, flags = np.split(flags, [len(call["trained"])])  # the rest of a reply lies beyond the row's end
            call["trained"][: len(own)] = True
            call["masked"] = np.pad(own, (0, len(call["trained"]) - len(own))) if known[row] else None
