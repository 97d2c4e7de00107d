"""Passes of rows through verl's workers: log-probs of the policy and of the first weights, and the updates."""

# pyright: reportPrivateImportUsage=false
import math
from typing import Any

import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.py_functional import rename_dict
from verl.workers.utils.padding import left_right_2_no_padding

from empo2.recipe.config import Algorithm
from empo2.recipe.trainer.objective import by_kind
from empo2.recipe.trainer.updates import fill_up


def old_log_probs(trainer: RayPPOTrainer, batch: DataProto, algorithm: Algorithm) -> tuple[torch.Tensor, float]:
    """Return log π_old, [rows, tokens], and the model FLOPs utilization of the pass that it took, 0 for none.

    They are vLLM's log-probs on the prompts as sent, tips included. With ``off_policy_old_log_probs: tip-free`` the
    off-policy rows get the log-probs of the policy before the update on their tip-free prompts instead (the paper's
    Algorithm 1): their ratio then starts at 1.
    """
    old, utilization = batch.batch["rollout_log_probs"].clone(), 0.0
    rows = batch.batch["off_policy"].nonzero()[:, 0].tolist()
    if rows and algorithm.off_policy_old_log_probs == "tip-free":
        output, utilization = trainer._compute_old_log_prob(fill_up(batch, rows, _multiple(trainer)))
        old[rows] = output.batch["old_log_probs"][: len(rows)]
    return old, utilization


def rows_with_kl(batch: DataProto, algorithm: Algorithm) -> torch.Tensor:
    """Return which rows the KL term, if there is one, holds to the first weights, [rows], bool."""
    with_tips = by_kind(batch.batch["off_policy"], batch.batch["memory"])["with_tips"]
    return torch.ones_like(with_tips) if algorithm.kl_rows == "all" else with_tips


def reference_log_probs(trainer: RayPPOTrainer, batch: DataProto, chosen: torch.Tensor) -> torch.Tensor:
    """Return the first weights' log-probs of the chosen rows, [rows, tokens]; 0 for the others."""
    reference = torch.zeros_like(batch.batch["rollout_log_probs"])
    if rows := chosen.nonzero()[:, 0].tolist():
        output = trainer._compute_ref_log_prob(fill_up(batch, rows, _multiple(trainer)))
        reference[rows] = output.batch["ref_log_prob"][: len(rows)]
    return reference


def _multiple(trainer: RayPPOTrainer) -> int:
    """Return the divisor of the rows of a forward pass without gradient: a micro-batch on every GPU."""
    sections = (trainer.config.actor_rollout_ref.rollout, trainer.config.actor_rollout_ref.ref)
    micro_batch = math.lcm(*(section.log_prob_micro_batch_size_per_gpu or 1 for section in sections))
    return trainer.resource_pool_manager.get_n_gpus() * micro_batch


def update_policy(trainer: RayPPOTrainer, planned: DataProto, size: int) -> dict[str, Any]:
    """Update the policy with mini-batches of ``size`` rows, in their order; return the metrics of all of them.

    verl's own (``RayPPOTrainer._update_actor``, 0.8.0) takes their size from the configuration, in prompts.
    """
    actor = trainer.config.actor_rollout_ref.actor
    data = left_right_2_no_padding(planned.to_tensordict())
    tu.assign_non_tensor(
        data,
        calculate_entropy=actor.entropy_coeff != 0,
        distillation_use_topk=False,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=actor.ppo_epochs,
        seed=actor.data_loader_seed,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    metrics = rename_dict(tu.get(trainer.actor_rollout_wg.update_actor(data), "metrics"), "actor/")
    metrics["perf/mfu/actor"] = metrics.pop("actor/mfu")
    return metrics
