"""What happens to agent-lightning's training rows between its adapter and verl's update: functions of a batch."""

# pyright: reportPrivateImportUsage=false
import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from agentlightning.verl.trainer import _grpo_group_metrics
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics

from empo2.recipe.config import Algorithm
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.trainer.manager import OFF_POLICY, Outcomes


def exact_rows(batch: DataProto, outcomes: Outcomes, algorithm: Algorithm) -> DataProto:
    """Rows that fit, with their ``off_policy`` flag and with exact scores: the adapter rounds scores to bfloat16.

    Rollouts that lose their group to overlong prompts are left out too, as their raw score would be their advantage.

    Raises:
        NoUsableRollouts: no row is left.
    """
    fits = ~batch.batch["is_drop_mask"]
    groups: dict[str, set[str]] = defaultdict(set)
    row_groups, row_rollouts = batch.non_tensor_batch["data_id_list"], batch.non_tensor_batch["rollout_id_list"]
    for row in fits.nonzero(as_tuple=True)[0].tolist():
        groups[row_groups[row]].add(row_rollouts[row])
    kept = [row for row in range(len(batch)) if fits[row] and len(groups[row_groups[row]]) > 1]
    if not kept:
        raise NoUsableRollouts("no two rollouts of a task have prompts within model.max_prompt_tokens")
    batch = batch.select_idxs(kept)
    ids = batch.non_tensor_batch["rollout_id_list"]
    scores = torch.tensor(
        [
            algorithm.return_scale * (outcomes.returns[i] + algorithm.intrinsic_coefficient * outcomes.intrinsic[i])
            for i in ids
        ]
    )
    length = batch.batch["token_level_scores"].shape[-1]
    ends = batch.batch["attention_mask"][:, -length:].sum(-1) - 1
    exact = torch.zeros(len(batch), length)
    exact[torch.arange(len(batch)), ends] = scores
    batch.batch["token_level_scores"] = exact
    batch.batch["off_policy"] = torch.tensor([outcomes.modes[i].update == OFF_POLICY for i in ids])
    return batch


def whole_mini_batches(batch: DataProto, *, group: int, gpus: int, planned_tasks: int) -> tuple[DataProto, int]:
    """Fill up with rows that weigh nothing (``filler``), and size the mini-batches to fit.

    agent-lightning floors a batch to whole mini-batches (``_train_step``): with one mini-batch a step, as in the
    paper, one lost rollout would cost the step.

    Args:
        group: rollouts of a task, which verl multiplies its mini-batch size with.
        gpus: a mini-batch is split evenly over so many.
        planned_tasks: the mini-batch size of a batch that lost nothing.

    Returns:
        The filled-up batch and the ``ppo_mini_batch_size`` that divides it, in tasks.
    """
    unit = math.lcm(group, gpus)
    updates = max(1, round(len(batch) / (planned_tasks * group)))
    while True:
        mini_batch = math.ceil(len(batch) / (updates * unit)) * unit
        missing = updates * mini_batch - len(batch)
        if missing < mini_batch:
            break
        updates -= 1  # one could hold fillers alone, for which Adam's momentum would still move the weights
    batch.batch["filler"] = torch.zeros(len(batch), dtype=torch.bool)
    if missing:
        filler = batch.select_idxs([0] * missing)
        # One token each, so that a rollout-level advantage can be had; `weightless_fillers` takes it away again.
        filler.batch["response_mask"] = torch.zeros_like(filler.batch["response_mask"])
        filler.batch["response_mask"][:, 0] = 1
        filler.batch["token_level_scores"] = torch.zeros_like(filler.batch["token_level_scores"])
        filler.batch["filler"] = torch.ones(missing, dtype=torch.bool)
        for key in ("rollout_id_list", "data_id_list"):
            filler.non_tensor_batch[key] = np.array([f"filler-{index}" for index in range(missing)])
        batch = DataProto.concat([batch, filler])
    return batch, mini_batch // group


def weightless_fillers(batch: DataProto) -> DataProto:
    """The batch of the update: fillers have no token, and the real rows' 1/N counts the real rows only."""
    filler = batch.batch["filler"]
    update = DataProto(batch=batch.batch.clone(), non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info)
    del update.batch["filler"]
    # agent-lightning divided by all rows, the filled-up ones too.
    weight = (~filler).float() * len(batch) / (~filler).sum()
    update.batch["advantages"] = update.batch["advantages"] * weight.unsqueeze(-1)
    update.batch["response_mask"] = update.batch["response_mask"] * (~filler).unsqueeze(-1)
    return update


def without_fillers(batch: DataProto) -> tuple[DataProto, dict[str, Any]]:
    """A trained batch's real rows, and agent-lightning's metrics of them (``_train_step`` counted all rows)."""
    real = batch.select_idxs((~batch.batch["filler"]).nonzero(as_tuple=True)[0].tolist())
    real.meta_info = {**real.meta_info, "global_token_num": real.batch["attention_mask"].sum(-1).tolist()}
    raw = DataProto(batch=real.batch.clone(), non_tensor_batch=real.non_tensor_batch)
    raw.batch["advantages"] = raw.batch["returns"]  # the same in grpo, but for agent-lightning's normalisation
    rollouts = len(set(real.non_tensor_batch["rollout_id_list"]))
    return real, {
        **compute_data_metrics(batch=raw, use_critic=False),
        **_grpo_group_metrics(real),
        "training/n_sample_collected": len(real),
        "training/n_sample_trained": len(real),
        "critic/n_transition_after_dropping": len(real),
        "training/rollout_level_advantage/n_rows": len(real),
        "training/rollout_level_advantage/n_rollouts": rollouts,
    }
