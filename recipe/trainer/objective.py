"""EMPO²'s hybrid objective (arXiv 2602.23008) as verl's loss function. docs/algorithm.md has the formula.

The three modes share one loss. They differ in the prompt under which π_θ sees a row (step_results.py) and in the mask:

- on-policy, with or without tips: π_θ and π_old read the same prompt;
- off-policy: π_old, vLLM's log-probs, read the tips; π_θ does not. Tokens that π_θ gives less than δ are masked.
"""

import math
from typing import Any

import torch
from agentlightning.verl.per_rollout_loss import compute_policy_loss_per_rollout_mean
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding


def trust_mask(log_prob: torch.Tensor, off_policy: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return 1[π_θ(a|s,u) ≥ δ] for the tokens of off-policy rows, 1 for all others.

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
    config: Any,
    model_output: dict[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    *,
    mask_threshold: float,
    gap_limit: float = math.inf,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a micro-batch's share of (1/M) Σ_rollouts (1/T) Σ_tokens [clipped term · mask - β KL + λ H], negated.

    M counts the rollouts of the optimizer step and T a rollout's trained tokens. Every term has these weights, so
    β and λ mean the same for any number of mini-batches. The mask multiplies the clipped term only.

    Args:
        config: verl's ``ActorConfig``.
        model_output: ``log_probs`` (and ``entropy``), nested over the rows' tokens.
        data: the micro-batch. Beside verl's own keys it has ``off_policy``, [rows], bool, ``token_weight``, [rows],
            1/(M·T), by which the advantages are already multiplied (updates.py), and ``row``, [rows], its number in
            the step's batch.
        dp_group: unused; part of verl's call.
        mask_threshold: δ, a probability.
        gap_limit: nats. On-policy rows whose mean log-prob is further from vLLM's have no clipped term.

    Returns:
        The scalar loss, and metrics: sums over tokens, which ``tracking.name_sums`` turns into fractions, and
        ``masked_at``, of each masked token the number of its row and its position in the response, one after another.
    """
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    device = log_prob.device
    tokens = data["response_mask"].to(device).bool()
    off_policy = data["off_policy"].to(device)
    trusted = trust_mask(log_prob, off_policy, mask_threshold)
    weight = data["token_weight"].to(device).unsqueeze(-1) * tokens
    # Before the first update π_θ equals π_old in on-policy rows, so this measures how far trainer and vLLM disagree.
    log_ppl_gap = ((log_prob.detach() - data["old_log_probs"]) * tokens).sum(-1) / tokens.sum(-1).clamp_min(1)
    agreeing = off_policy | (log_ppl_gap.abs() <= gap_limit)

    ranks = data["dp_size"]  # FSDP averages the ranks' gradients
    config.global_batch_info["dp_size"] = ranks
    clipped_loss: Any = compute_policy_loss_per_rollout_mean
    loss, clipped = clipped_loss(
        old_log_prob=data["old_log_probs"],
        log_prob=log_prob,
        advantages=data["advantages"] * trusted * agreeing.unsqueeze(-1),
        response_mask=tokens,
        config=config,
    )
    sums: dict[str, Any] = {"actor/pg_loss": float(loss.detach())}
    if config.use_kl_loss:
        reference: Any = data["ref_log_prob"]
        divergence = kl_penalty(log_prob, reference, config.kl_loss_type)  # pyright: ignore[reportArgumentType]
        kl_loss = (divergence * weight).sum() * ranks
        loss = loss + config.kl_loss_coef * kl_loss
        sums["actor/kl_loss"] = float(kl_loss.detach())
    if config.entropy_coeff:
        entropy = (no_padding_2_padding(model_output["entropy"], data) * weight).sum() * ranks
        loss = loss - config.entropy_coeff * entropy
        sums["actor/entropy_loss"] = float(entropy.detach())

    rows = ~off_policy & tokens.any(-1)
    count = float(tokens.sum())
    sums |= {name: count * value for name, value in clipped.items()}  # means over this micro-batch's tokens
    sums |= {
        "trained_tokens": count,
        "off_policy_tokens": float((tokens & off_policy.unsqueeze(-1)).sum()),
        "masked_tokens": float((tokens & ~trusted).sum()),
        "compared_rows": float(rows.sum()),
        "disagreeing_rows": float((~agreeing).sum()),
        "log_ppl_gap": float(log_ppl_gap[rows].abs().sum()),
    }
    rows, positions = (tokens & ~trusted).nonzero(as_tuple=True)
    masked_at = torch.stack([data["row"].to(device)[rows], positions], dim=1).flatten().tolist()
    return loss, {**Metric.from_dict(sums, AggregationType.SUM), "masked_at": masked_at}
