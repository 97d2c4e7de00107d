"""EMPO²'s hybrid objective (arXiv 2602.23008) as verl's loss function. docs/algorithm.md has the formula.

The three modes share one loss. They differ in the prompt under which π_θ sees a row (step_results.py) and in the mask:

- on-policy, with or without tips: π_θ and π_old read the same prompt;
- off-policy: π_old, vLLM's log-probs, read the tips; π_θ does not. Tokens that π_θ gives less than δ are masked. With
  distillation these rows have a KL to the policy that sampled them with the tips in the place of the clipped term.
"""

import math
from typing import Any

import torch
from agentlightning.verl.per_rollout_loss import compute_policy_loss_per_rollout_mean
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from empo2.recipe.trainer.log_probs import trained_places


def by_kind(off_policy: torch.Tensor, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return which rows are of each kind, by its name in metrics; the arguments are those of the rows' modes."""
    return {"off_policy": off_policy, "with_tips": memory & ~off_policy, "without_tips": ~memory}


def top_kl(student: torch.Tensor, teacher: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    """Return KL(teacher ‖ student) of each token, [rows, tokens], or KL(student ‖ teacher) if ``reverse``.

    All tokens that are not among the teacher's likeliest are one bucket, in both distributions.

    Args:
        student: [rows, tokens, K], log-probs of the teacher's likeliest tokens.
        teacher: [rows, tokens, K], the teacher's own; -inf for an entry that is none. A token without entries has KL 0.
    """
    there = teacher.isfinite()
    student, teacher = torch.where(there, student, -math.inf), torch.where(there, teacher, -math.inf)
    q, p = (torch.cat([each, _rest(each)], dim=-1) for each in (student, teacher))
    first, second = (q, p) if reverse else (p, q)
    there = torch.cat([there, there.new_ones(*there.shape[:-1], 1)], dim=-1)
    gap = torch.where(there, first, 0.0) - torch.where(there, second, 0.0)
    return (first.exp() * gap).sum(-1)


def _rest(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of all other tokens together, [rows, tokens, 1]; below 1e-5 it is rounding of the sum."""
    return (1 - log_probs.exp().sum(-1, keepdim=True)).clamp_min(1e-5).log()


def hybrid_loss(
    config: Any,
    model_output: dict[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    *,
    mask_threshold: float,
    gap_limit: float = math.inf,
    distillation: float = 0.0,
    reverse: bool = False,
    kl_with_tips: bool = False,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a micro-batch's share of (1/M) Σ_rollouts (1/T) Σ_tokens [clipped term · mask - β KL + λ H], negated.

    M counts the rollouts of the optimizer step and T a rollout's trained tokens. Every term has these weights, so
    β and λ mean the same for any number of mini-batches. The mask multiplies the clipped term only. Distilled rows,
    whose advantages are 0, have - κ KL of teacher and π_θ (`top_kl`).

    Args:
        config: verl's ``ActorConfig``.
        model_output: ``log_probs`` (and ``entropy``, and ``student_log_probs``, those of the teacher's likeliest
            tokens), nested over the rows' tokens.
        data: the micro-batch. Beside verl's own keys it has ``off_policy`` and ``memory``, the row's mode, and
            ``distilled``, each [rows], bool; ``token_weight``, [rows], 1/(M·T), by which the advantages are already
            multiplied (updates.py); ``first_index``, [rows], that of the row's first token among all tokens of the
            step's responses; and where rows are distilled ``teacher_log_probs`` [rows, trained tokens, K] (rows.py).
        dp_group: unused; part of verl's call.
        mask_threshold: δ, a probability; 0 masks nothing.
        gap_limit: nats. On-policy rows whose mean log-prob is further from vLLM's have no clipped term.
        distillation: κ.
        reverse: whether the KL of distilled rows is KL(π_θ ‖ teacher).
        kl_with_tips: whether on-policy rows with tips alone have the KL to the first weights.

    Returns:
        The scalar loss, and metrics: sums over tokens, which ``tracking.name_sums`` turns into fractions, and
        ``masked_at``, the indices of the masked tokens among all tokens of the step's responses.
    """
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    device = log_prob.device
    tokens = data["response_mask"].to(device).bool()
    off_policy = data["off_policy"].to(device)
    kinds = by_kind(off_policy, data["memory"].to(device))
    # 1[π_θ(a|s,u) ≥ δ] for the tokens of off-policy rows, by the *current* policy; 1 for all others.
    log_threshold = math.log(mask_threshold) if mask_threshold > 0 else -math.inf
    trusted = ~off_policy.unsqueeze(-1) | (log_prob.detach() >= log_threshold)
    weight = data["token_weight"].to(device).unsqueeze(-1) * tokens
    # Before the first update π_θ equals π_old in on-policy rows, so this measures how far trainer and vLLM disagree.
    moved = (log_prob.detach() - data["old_log_probs"]) * tokens
    log_ppl_gap = moved.sum(-1) / tokens.sum(-1).clamp_min(1)
    agreeing = off_policy | (log_ppl_gap.abs() <= gap_limit)
    advantages = data["advantages"] * trusted * agreeing.unsqueeze(-1)

    ranks = data["dp_size"]  # FSDP averages the ranks' gradients
    config.global_batch_info["dp_size"] = ranks
    clipped_loss: Any = compute_policy_loss_per_rollout_mean
    loss, clipped = clipped_loss(
        old_log_prob=data["old_log_probs"],
        log_prob=log_prob,
        advantages=advantages,
        response_mask=tokens,
        config=config,
    )
    moved = moved.clamp(-20, 20)  # as agent-lightning's
    ratio, high, low = moved.exp(), 1 + config.clip_ratio_high, 1 - config.clip_ratio_low
    distils = "teacher_log_probs" in data
    of_tokens = {
        "tokens": tokens,
        "clipped": torch.where(advantages > 0, ratio > high, (advantages < 0) & (ratio < low)),
        "masked": ~trusted | ~agreeing.unsqueeze(-1),
        "old_kl": -moved,
    }
    masks = {kind: mask_threshold > 0 if kind == "off_policy" else gap_limit < math.inf for kind in kinds}
    nowhere = {("masked", kind) for kind in kinds if not masks[kind]}
    nowhere |= {("clipped", "off_policy"), ("masked", "off_policy")} if distils else set()  # no clipped term
    sums: dict[str, Any] = {"actor/pg_loss": float(loss.detach())}
    if distils:
        student = no_padding_2_padding(model_output["student_log_probs"], data)
        taught = tokens & data["distilled"].to(device).unsqueeze(-1)
        teacher: Any = data["teacher_log_probs"]
        places = trained_places(tokens, teacher).unsqueeze(-1).expand(*tokens.shape, teacher.shape[-1])
        divergence = top_kl(student, teacher.to(device).gather(1, places), reverse=reverse) * taught
        distilled_loss = (divergence * weight).sum() * ranks
        loss = loss + distillation * distilled_loss
        sums["actor/distillation_loss"] = float(distilled_loss.detach())
        sums |= {"distilled_tokens": float(taught.sum()), "distillation_kl": float(divergence.detach().sum())}
    if config.use_kl_loss:
        reference: Any = data["ref_log_prob"]
        divergence = kl_penalty(log_prob, reference, config.kl_loss_type)  # pyright: ignore[reportArgumentType]
        if kl_with_tips:  # the other rows have no reference
            divergence = divergence * kinds["with_tips"].unsqueeze(-1)
            sums["start_kl/with_tips"] = float((divergence.detach() * tokens).sum())
        else:
            of_tokens["start_kl"] = divergence.detach()
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
        "compared_rows": float(rows.sum()),
        "disagreeing_rows": float((~agreeing).sum()) * ranks,  # of sums verl takes the mean over ranks
        "log_ppl_gap": float(log_ppl_gap[rows].abs().sum()),
    }
    for kind, chosen in kinds.items():
        of_kind = {name: each for name, each in of_tokens.items() if (name, kind) not in nowhere}
        sums |= {f"{name}/{kind}": float((each * tokens)[chosen].sum()) for name, each in of_kind.items()}
    row, token = (tokens & ~trusted).nonzero(as_tuple=True)
    masked_at = data["first_index"].to(device)[row] + token
    return loss, {**Metric.from_dict(sums, AggregationType.SUM), "masked_at": masked_at.tolist()}
