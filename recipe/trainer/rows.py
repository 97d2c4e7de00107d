"""Put EMPO²'s advantages and mode flags on agent-lightning's training rows."""

from collections.abc import Mapping, Sequence

import torch
from verl import DataProto

from empo2.recipe.protocol import UpdateResult
from empo2.recipe.trainer.compat.agentlightning import GIVEN_ADVANTAGES
from empo2.recipe.trainer.step_results import RolloutResult, StepResults


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


def update_results(batch: DataProto, results: StepResults, masked: Mapping[int, Sequence[int]]) -> list[UpdateResult]:
    """Return what became of each rollout of a step.

    Args:
        batch: before the update, with its advantages (``use_given_advantages``).
        masked: of each row that was updated, the positions of its masked tokens.
    """
    ids, mask = batch.non_tensor_batch["rollout_id_list"], batch.batch["response_mask"]
    told = [
        UpdateResult(rollout_id=rollout, dropped=dropped.reason, **dropped.mode.model_dump())
        for rollout, dropped in results.dropped.items()
    ]
    for rollout, result in results.kept.items():
        rows = (ids == rollout).nonzero()[0].tolist()
        updated = [len(masked[row]) for row in rows if row in masked]
        advantage = float((batch.batch["returns"] * mask)[rows].sum() / mask[rows].sum().clamp_min(1))
        mode = result.mode.model_dump()
        told.append(
            UpdateResult(
                rollout_id=rollout,
                return_=result.return_,
                advantage=advantage,
                masked_tokens=sum(updated) if updated else None,
                **mode,
            )
        )
    return told
