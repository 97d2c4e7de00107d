"""Put EMPO²'s advantages, mode flags and teachers on agent-lightning's rows, and note what was trained of a call."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from verl import DataProto

from empo2.recipe.protocol import TOP_TOKENS, UpdateResult
from empo2.recipe.rollout_log import CallRow
from empo2.recipe.trainer.step_results import Results, StepResults

type Turn = tuple[str, int]
"""Rollout id, and number among its calls."""


def set_advantages(batch: DataProto, results: Results, advantages: Mapping[str, float]) -> None:
    """Put each rollout's advantage on the trained tokens of its rows, and flag the rows' modes; in place.

    Rows of a rollout that is held are on-policy ones: they have the tips of its calls.
    """
    ids = batch.non_tensor_batch["rollout_id_list"].tolist()
    rows = torch.tensor([advantages[rollout] for rollout in ids])
    batch.batch["advantages"] = rows.unsqueeze(-1) * batch.batch["response_mask"]
    batch.batch["off_policy"] = torch.tensor([results[rollout].tip_free for rollout in ids])
    batch.batch["memory"] = torch.tensor([results[rollout].mode.memory for rollout in ids])
    batch.batch["distilled"] = torch.zeros(len(ids), dtype=torch.bool)


def distill(batch: DataProto, chosen: Collection[str], results: StepResults, *, imitate: bool) -> dict[str, float]:
    """Take the advantages from off-policy rollouts, flag the rows of the chosen rollouts, and give them their teacher.

    The teacher of a token is what vLLM sampled it from: the log-probs of its likeliest tokens, with tips in the prompt.
    ``teacher_tokens`` are their ids, ``teacher_log_probs`` -inf where there is none, both [rows, trained tokens,
    TOP_TOKENS]: of the tokens of each row that are trained, in their order (`log_probs.trained_places`). All positions
    would need 5 GB, where each of 30 turns of 16 x 8 episodes is a row of 8,192.

    Args:
        batch: all rows of the adapter, as `set_advantages` leaves them; changed in place.
        chosen: see `worth_imitating`.
        imitate: whether the teacher says what was sampled, with certainty.

    Returns:
        The number of distilled rows, and of tokens without a teacher in the rows of these rollouts. A row of such
        tokens alone is not distilled.
    """
    off_policy = [results.kept[rollout].mode.off_policy for rollout in batch.non_tensor_batch["rollout_id_list"]]
    batch.batch["advantages"][torch.tensor(off_policy)] = 0.0
    lengths, untaught = batch.batch["response_mask"].sum(-1).tolist(), 0
    ids = torch.zeros(len(batch), max(lengths), TOP_TOKENS, dtype=torch.int32)
    log_probs = torch.full(ids.shape, -math.inf)
    answered = {rollout: results.answered(rollout) for rollout in chosen}
    for row, rollout, turns in turns_of_rows(batch, {rollout: results.kept[rollout] for rollout in chosen}):
        calls = [answered[rollout][turn] for turn in turns]
        tops = [top for call in calls for top in ([{token: 0.0} for token in call.reply] if imitate else call.tops)]
        for token, top in enumerate(tops[: lengths[row]]):  # the rest lies beyond the row
            ids[row, token, : len(top)] = torch.tensor([*top])
            log_probs[row, token, : len(top)] = torch.tensor([*top.values()])
        taught = sum(map(bool, tops[: lengths[row]]))
        untaught += lengths[row] - taught
        batch.batch["distilled"][row] = taught > 0
    batch.batch["teacher_tokens"], batch.batch["teacher_log_probs"] = ids, log_probs
    return {"empo2/distilled_rows": float(batch.batch["distilled"].sum()), "empo2/untaught_tokens": float(untaught)}


def turns_of_rows(batch: DataProto, results: Results) -> Iterator[tuple[int, str, Sequence[int]]]:
    """Yield each row of a batch, its rollout and its turns, whose replies are its trained tokens and what is cut.

    Args:
        batch: all rows of the adapter; those of other rollouts are passed over.
    """
    ahead = {rollout: iter(result.rows) for rollout, result in results.items()}
    for row, rollout in enumerate(batch.non_tensor_batch["rollout_id_list"].tolist()):
        if rollout in ahead:
            yield row, rollout, next(ahead[rollout])


def add_by_turn(batch: DataProto, results: StepResults, advantages: Mapping[Turn, float]) -> None:
    """Add the advantage of its turn to that of each trained token, in place.

    Args:
        batch: all rows of the adapter.
        advantages: of each trained turn.
    """
    mask = batch.batch["response_mask"].bool()
    replies = {rollout: [len(call.reply) for call in results.answered(rollout)] for rollout in results.kept}
    for row, rollout, turns in turns_of_rows(batch, results.kept):
        added = [advantages[rollout, turn] for turn in turns for _ in range(replies[rollout][turn])]
        tokens = int(mask[row].sum())  # what there are more lies beyond the row's end
        batch.batch["advantages"][row, mask[row]] += torch.tensor(added[:tokens])


def groups_without_gradient(batch: DataProto) -> float:
    """Return the fraction of groups in which no token has an advantage or is distilled."""
    groups = batch.non_tensor_batch["data_id_list"]
    learning = groups[(batch.batch["advantages"].any(-1) | batch.batch["distilled"]).numpy()]
    return 1 - len(set(learning)) / len(set(groups))


def add_masks(
    calls: Sequence[CallRow],
    results: Results,
    batch: DataProto,
    masked: torch.Tensor,
    known: torch.Tensor,
) -> None:
    """Note in the calls which tokens of their replies were trained, and which of these were masked; in place.

    Args:
        batch: all rows of the adapter.
        masked: [rows, tokens], bool.
        known: [rows], bool; whether that is known of a row.
    """
    answered: dict[str, list[CallRow]] = {}
    for call in calls:
        if len(call.get("response_ids", ())):
            answered.setdefault(call["rollout"], []).append(call)
    for row, rollout, turns in turns_of_rows(batch, results):
        flags = masked[row][batch.batch["response_mask"][row].bool()].numpy()
        for turn in turns:
            call = answered[rollout][turn]
            own, flags = np.split(flags, [len(call["trained"])])  # the rest of a reply lies beyond the row's end
            call["trained"][: len(own)] = True
            call["masked"] = np.pad(own, (0, len(call["trained"]) - len(own))) if known[row] else None


def update_results(
    batch: DataProto, results: StepResults, masked: torch.Tensor, updated: torch.Tensor
) -> list[UpdateResult]:
    """Return what became of each rollout of a step.

    Args:
        batch: all rows of the adapter, with their advantages.
        masked: [rows, tokens], bool.
        updated: [rows], bool; False for rows that the update left out.
    """
    ids, mask = batch.non_tensor_batch["rollout_id_list"], batch.batch["response_mask"]
    told = [
        UpdateResult(rollout_id=rollout, dropped=dropped.reason, **dropped.mode.model_dump())
        for rollout, dropped in results.dropped.items()
    ]
    for rollout, result in results.kept.items():
        rows = torch.from_numpy(ids == rollout)
        told.append(
            UpdateResult(
                rollout_id=rollout,
                return_=result.return_,
                advantage=float((batch.batch["advantages"] * mask)[rows].sum() / mask[rows].sum().clamp_min(1)),
                masked_tokens=int(masked[rows].sum()) if updated[rows].any() else None,
                **result.mode.model_dump(),
            )
        )
    return told
