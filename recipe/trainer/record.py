"""One trained episode of each step as text, for `empo2 report`: what was read, what was trained, what was masked."""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Protocol

from verl import DataProto

from empo2.recipe.config import Algorithm
from empo2.recipe.redaction import redacted
from empo2.recipe.trainer.results import RolloutResult

_PROMPT_TOKENS, _REST_TOKENS = 1000, 3000  # of a row: the end of its prompt, and the beginning of what follows it


class Decoder(Protocol):
    def decode(self, token_ids: list[int], /) -> Any: ...


def episode_record(
    step: int, batch: DataProto, results: Mapping[str, RolloutResult], algorithm: Algorithm, tokenizer: Decoder
) -> dict[str, Any]:
    """Return a line of ``episodes.jsonl`` without secrets: the first row of one episode that was trained.

    It is one with an advantage if there is any, rather off-policy, rather with memory. ``spans`` are
    ``[kind, text, tokens]``, at most 4,000 tokens in all; a kind is ``read``, ``trained`` or ``masked``.

    Of off-policy rows, ``mask_known`` tells whether masked tokens are told apart: only tip-free old log-probs say,
    before the first update of the step, what π_θ gives a token.

    Args:
        batch: after the step, with its log-probs and advantages.
        results: by rollout id.
    """
    rollouts = batch.non_tensor_batch["rollout_id_list"].tolist()
    advantages = batch.batch["returns"]  # before agent-lightning's division by tokens and rows (use_given_advantages)

    def telling(row: int) -> tuple[bool, bool, bool]:
        mode = results[rollouts[row]].mode
        return bool(advantages[row].any()), mode.off_policy, mode.memory

    row = rollouts.index(rollouts[max(range(len(rollouts)), key=telling)])
    result = results[rollouts[row]]
    trained = batch.batch["response_mask"][row].bool()
    present = batch.batch["attention_mask"][row].bool()
    rest = present[-len(trained) :]
    prompt = batch.batch["prompts"][row][present[: -len(trained)]].tolist()
    mask_known = not result.mode.off_policy or algorithm.off_policy_old_log_probs == "tip-free"
    masked = trained & False
    if result.mode.off_policy and mask_known and algorithm.mask_threshold > 0:
        masked = trained & (batch.batch["old_log_probs"][row] < math.log(algorithm.mask_threshold))
    kinds = ["read"] * len(prompt)
    kinds += ["masked" if m else "trained" if t else "read" for t, m in zip(trained[rest], masked[rest], strict=True)]
    tokens = [*prompt, *batch.batch["responses"][row][rest].tolist()]
    first, last = max(0, len(prompt) - _PROMPT_TOKENS), len(prompt) + _REST_TOKENS
    spans = []
    for kind, group in groupby(zip(kinds[first:last], tokens[first:last], strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in group]
        spans.append([kind, tokenizer.decode(ids), len(ids)])
    mode = f"memory, {result.mode.update_mode}" if result.mode.memory else "no memory"
    return redacted(
        {
            "step": step,
            "mode": mode,
            "task": dict(result.task),
            "return": result.return_,
            "advantage": float(advantages[row][trained].mean()) if trained.any() else 0.0,
            "tips": list(result.tips),
            "mask_known": mask_known,
            "cut": first > 0 or last < len(tokens),
            "spans": spans,
        }
    )
