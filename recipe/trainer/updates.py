"""Plan the optimizer steps of a training step: the rollouts of each, and the order of their rows in the batch."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from verl import DataProto

FILLER = -1


def plan_updates(groups: Sequence[str], updates: int) -> list[list[int]]:
    """Assign rows to optimizer steps; each gets whole groups, and their numbers of groups differ by at most one.

    Args:
        groups: the group of each row. A rollout's rows share its group, so they stay together too.
        updates: number of optimizer steps; reduced to the number of groups if there are fewer.

    Returns:
        The rows of each optimizer step; their numbers of rows are as even as whole groups allow.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        rows[group].append(row)
    updates = min(updates, len(rows))
    room = [len(rows) // updates + (update < len(rows) % updates) for update in range(updates)]
    plan: list[list[int]] = [[] for _ in range(updates)]
    for members in sorted(rows.values(), key=len, reverse=True):
        update = min((u for u in range(updates) if room[u]), key=lambda u: len(plan[u]))
        plan[update] += members
        room[update] -= 1
    return plan


def lay_out(
    plan: Sequence[Sequence[int]], tokens: Sequence[int], ranks: int, micro_batch: int
) -> tuple[list[int], int]:
    """Order rows so that verl cuts the planned mini-batches, with fillers for those that have too few rows.

    verl cuts a batch into one part per rank, each part into mini-batches of equal size, and those into
    micro-batches of equal size. Each rank gets about the same number of tokens of each mini-batch.

    Args:
        tokens: length of each row.
        ranks: processes that share the data.
        micro_batch: most rows of a forward pass on one rank.

    Returns:
        Indices of rows, ``FILLER`` for a filler, ``len(plan)`` mini-batches of equal size; and the rows of a
        micro-batch, which are fewer than the most where this needs fewer fillers, since without packing a filler costs
        as much as the longest row beside it.
    """
    rows_of_rank = math.ceil(max(map(len, plan)) / ranks)  # in the largest mini-batch
    passes = math.ceil(rows_of_rank / micro_batch)
    rows_of_pass = math.ceil(rows_of_rank / passes)
    slots = passes * rows_of_pass
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for rows in plan:
        shares: list[list[int]] = [[] for _ in range(ranks)]
        sizes = [0] * ranks
        for row in sorted(rows, key=lambda row: -tokens[row]):
            rank = min((rank for rank in range(ranks) if len(shares[rank]) < slots), key=lambda rank: sizes[rank])
            shares[rank].append(row)
            sizes[rank] += tokens[row]
        for part, share in zip(parts, shares, strict=True):
            part += share + [FILLER] * (slots - len(share))
    return [row for part in parts for row in part], rows_of_pass


def planned_batch(
    batch: DataProto,
    *,
    updates: int,
    ranks: int,
    micro_batch: int,
    other_terms: torch.Tensor | bool = True,
    frozen: bool = False,
) -> tuple[DataProto, int]:
    """Return the batch for a training step's updates, and the number of rows of each update, fillers included.

    The loss of an update is the mean over its rollouts, as in any mini-batch of M rollouts:
    (1/M) Σ_rollouts (1/T) Σ_tokens [...], where T counts a rollout's trained tokens in all of its rows. Advantages
    are returned multiplied by 1/(M·T), which ``token_weight`` holds for the other terms. ``first_index`` is that of a
    row's first token among all tokens of the batch's responses.

    Args:
        batch: real rows only, with their advantages; left as it is.
        updates: optimizer steps.
        ranks: processes that share the data.
        micro_batch: most rows of a forward pass on one rank; ``meta_info`` gets their number, by the engine's key.
        other_terms: which rows have a KL or an entropy term, [rows], bool; or whether all have. Without one a row whose
            advantages are 0, of a group with equal scores, has no gradient unless it is distilled, and is left out
            after the weights are known. An update keeps one row, and the first an on-policy one, by which vLLM and the
            trainer are compared.
        frozen: the learning rate is 0, so every row is left out as if it had no gradient.
    """
    groups, rollouts = (batch.non_tensor_batch[key].tolist() for key in ("data_id_list", "rollout_id_list"))
    plan = plan_updates(groups, updates)
    row_tokens = batch.batch["response_mask"].sum(-1)
    rollout_tokens: Counter[str] = Counter()
    for rollout, count in zip(rollouts, row_tokens.tolist(), strict=True):
        rollout_tokens[rollout] += count
    weights = [0.0] * len(batch)
    for rows in plan:
        members = len({rollouts[row] for row in rows})
        for row in rows:
            weights[row] = 1 / (members * rollout_tokens[rollouts[row]])
    learns = (batch.batch["advantages"] != 0).any(-1) | batch.batch["distilled"] | other_terms
    keeps, off_policy = (learns & (not frozen)).tolist(), batch.batch["off_policy"].tolist()
    keeps[min(plan[0], key=lambda row: (off_policy[row], not keeps[row]))] = True  # it is one that learns, if any does
    plan = [[row for row in rows if keeps[row]] or rows[:1] for rows in plan]
    order, rows_of_pass = lay_out(plan, batch.batch["attention_mask"].sum(-1).tolist(), ranks, micro_batch)
    planned = with_fillers(batch, order)
    planned.meta_info["micro_batch_size_per_gpu"] = rows_of_pass
    planned.batch["token_weight"] = torch.tensor([0.0 if row == FILLER else weights[row] for row in order])
    planned.batch["advantages"] = planned.batch["advantages"] * planned.batch["token_weight"].unsqueeze(-1)
    planned.batch["first_index"] = torch.tensor(order) * batch.batch["responses"].shape[-1]
    return planned, len(order) // len(plan)


def what_was_masked(
    batch: DataProto, planned: DataProto, masked_at: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens of the responses an update masked, [rows, tokens], and which rows it had, [rows]; both bool.

    Args:
        planned: of the rows of ``batch``, as `planned_batch` returns it.
        masked_at: indices among all tokens of the responses.
    """
    rows, width = batch.batch["response_mask"].shape
    masked = torch.zeros(rows, width, dtype=torch.bool)
    masked.view(-1)[torch.tensor(masked_at, dtype=torch.long)] = True
    updated = torch.zeros(rows, dtype=torch.bool)  # the others were left out: their groups have no gradient
    updated[planned.batch["first_index"][planned.batch["token_weight"] > 0] // width] = True
    return masked, updated


def with_fillers(batch: DataProto, order: Sequence[int]) -> DataProto:
    """Select rows in ``order``; a filler is a row of two tokens with weight 0."""
    selected = batch.select_idxs([max(row, 0) for row in order])
    fillers = torch.tensor([row == FILLER for row in order])
    if fillers.any():
        prompt = batch.batch["attention_mask"].shape[-1] - batch.batch["responses"].shape[-1]
        selected.batch["response_mask"][fillers] = 0
        attention = torch.zeros_like(selected.batch["attention_mask"][fillers])
        attention[:, prompt - 1 : prompt + 1] = 1
        selected.batch["attention_mask"][fillers] = attention
    lengths = selected.batch["attention_mask"].sum(-1).tolist()
    selected.meta_info = {**batch.meta_info, "global_token_num": lengths}
    return selected


def fill_up(batch: DataProto, rows: Sequence[int], multiple: int) -> DataProto:
    """Select rows, and fillers until there is a multiple of ``multiple``, as forward passes over ranks require."""
    return with_fillers(batch, [*rows, *[FILLER] * (-len(rows) % multiple)])
