"""One trained episode of each step as text, for `empo2 report`: what was read, what was trained, what was masked."""

from itertools import groupby
from typing import Any

import torch
from verl import DataProto

from empo2.recipe.redaction import redacted
from empo2.recipe.trainer.step_results import Results

_PROMPT_TOKENS, _REST_TOKENS = 1000, 3000  # of a row: the end of its prompt, and the beginning of what follows it


def episode_record(
    step: int, batch: DataProto, results: Results, masked: torch.Tensor, known: torch.Tensor, tokenizer: Any
) -> dict[str, Any]:
    """Return a line of ``episodes.jsonl`` without secrets: one row that was trained, the first one of its episode.

    It is one with an advantage or a teacher if there is any, rather off-policy, rather with memory. ``spans`` are
    ``[kind, text, tokens]``, at most 4,000 tokens in all; a kind is ``read``, ``trained`` or ``masked``.

    Args:
        batch: with its advantages.
        masked: [rows, tokens], bool: those of the response that the update masked.
        known: [rows], bool; whether that is known of a row.
    """
    rollouts = batch.non_tensor_batch["rollout_id_list"].tolist()
    advantages = batch.batch["advantages"]

    def telling(row: int) -> tuple[bool, bool, bool]:
        mode = results[rollouts[row]].mode
        learns = bool(advantages[row].any() or batch.batch["distilled"][row])
        return learns, mode.off_policy, mode.memory

    rollout = rollouts[max(range(len(rollouts)), key=telling)]
    row, result = rollouts.index(rollout), results[rollout]
    trained = batch.batch["response_mask"][row].bool()
    present = batch.batch["attention_mask"][row].bool()
    of_row = masked[row] & known[row]
    rest = present[-len(trained) :]
    prompt = batch.batch["prompts"][row][present[: -len(trained)]].tolist()
    kinds = ["read"] * len(prompt)
    kinds += ["masked" if m else "trained" if t else "read" for t, m in zip(trained[rest], of_row[rest], strict=True)]
    tokens = [*prompt, *batch.batch["responses"][row][rest].tolist()]
    first, last = max(0, len(prompt) - _PROMPT_TOKENS), len(prompt) + _REST_TOKENS
    spans = []
    for kind, group in groupby(zip(kinds[first:last], tokens[first:last], strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in group]
        spans.append([kind, tokenizer.decode(ids), len(ids)])
    return redacted(
        {
            "step": step,
            "rollout": rollout,
            "mode": result.mode.name,
            "task": dict(result.task),
            "return": result.return_,
            "advantage": float(advantages[row][trained].mean()) if trained.any() else 0.0,
            "tips": list(result.tips),
            "mask_known": bool(known[row]),
            "cut": first > 0 or last < len(tokens),
            "spans": spans,
        }
    )
