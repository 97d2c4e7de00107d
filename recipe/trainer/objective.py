"""EMPO²'s hybrid objective (arXiv 2602.23008), as what it adds to agent-lightning's clipped policy loss.

The three modes share one loss. They differ in the prompt under which π_θ sees a row (rollouts.py) and in the mask:

- on-policy, with or without tips: π_θ and π_old read the same prompt;
- off-policy: π_old, vLLM's log-probs, read the tips; π_θ does not. Tokens that π_θ gives less than δ are masked.
"""

import math
from typing import Any

import agentlightning.verl.per_rollout_loss  # noqa: F401  registers the loss mode in whichever worker loads this module
import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding


def trust_mask(log_prob: torch.Tensor, off_policy: torch.Tensor, threshold: float) -> torch.Tensor:
    """1[π_θ(a|s,u) ≥ δ] for the tokens of off-policy rows, 1 for all others.

    Args:
        log_prob: [rows, tokens], natural logarithm, of the *current* policy.
        off_policy: [rows], bool.
        threshold: δ, a probability; 0 masks nothing.

    Returns:
        [rows, tokens], bool; no gradient flows through it.
    """
    log_threshold = math.log(threshold) if threshold > 0 else -math.inf
    return ~off_policy.unsqueeze(-1) | (log_prob.detach() >= log_threshold)


def hybrid_loss(
    config: Any, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None, *, mask_threshold: float
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` with the advantages of masked tokens set to zero: a loss function for ``set_loss_fn``.

    The mask multiplies the clipped term only, and its denominators stay: the advantages arrive already divided by the
    rollout's tokens and the batch's rows (agent-lightning's ``per_rollout_mean``).

    Args:
        config: verl's ``ActorConfig``.
        model_output: ``log_probs`` (and ``entropy``), nested over the rows' tokens.
        data: the micro-batch; beside verl's own keys ``off_policy``, [rows], bool.
        mask_threshold: δ, a probability.

    Returns:
        The scalar loss and verl's metrics, with sums to build ``empo2/masked_token_fraction`` and
        ``rollout_corr/log_ppl_abs_diff`` from.
    """
    log_prob = no_padding_2_padding(model_output["log_probs"], data).detach()
    off_policy = data["off_policy"].to(log_prob.device)
    trusted = trust_mask(log_prob, off_policy, mask_threshold)
    tokens = data["response_mask"].to(log_prob.device).bool()
    data["advantages"] = data["advantages"] * trusted

    loss, metrics = ppo_loss(config, model_output, data, dp_group)

    # Before the first update π_θ is π_old in on-policy rows: what is left is how far trainer and vLLM disagree.
    rows = ~off_policy & tokens.any(-1)
    log_ppl_gap = ((log_prob - data["old_log_probs"]) * tokens).sum(-1) / tokens.sum(-1).clamp_min(1)
    sums = {
        "off_policy_tokens": (tokens & off_policy.unsqueeze(-1)).sum(),
        "masked_tokens": (tokens & ~trusted).sum(),
        "compared_rows": rows.sum(),
        "log_ppl_gap": log_ppl_gap[rows].abs().sum(),
    }
    metrics |= Metric.from_dict({key: float(value) for key, value in sums.items()}, AggregationType.SUM)
    return loss, metrics
