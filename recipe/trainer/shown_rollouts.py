"""What a run's folder keeps of a step: what was played (`rollout_log`), and one trained episode as text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agentlightning.verl.agl_rollout_manager import CompletedRollout
from verl import DataProto

from empo2.memory import MemoryFileError
from empo2.memory.browse import stored_tips
from empo2.memory.file import reading
from empo2.recipe import run_folder
from empo2.recipe.config import Run
from empo2.recipe.failures import reported_error
from empo2.recipe.marked_lines import say_note
from empo2.recipe.messages import Message, reply_of, shared
from empo2.recipe.protocol import RolloutTag
from empo2.recipe.redaction import redacted
from empo2.recipe.rollout_log import CallRow, Phase, write_rollouts
from empo2.recipe.trainer.manager import Empo2RolloutManager
from empo2.recipe.trainer.rollout_calls import PlayedCall
from empo2.recipe.trainer.rows import add_masks
from empo2.recipe.trainer.step_results import Results, StepResults, mode_of

_TEXT_CHARACTERS = 20_000  # of one text, such as an image in a message
_ROLLOUT_CHARACTERS = 400_000  # of all new messages of a rollout; a chat that is written anew each turn may reach it
_PROMPT_TOKENS, _REST_TOKENS = 1000, 3000  # of a row: the end of its prompt, and the beginning of what follows it


def call_rows(
    played: Sequence[CompletedRollout],
    results: StepResults,
    step: int,
    phase: Phase,
    advantages: Mapping[str, float],
    memory: Path,
) -> list[CallRow]:
    """Return the calls of a step's rollouts, used or not, without secrets; no token of them is trained yet.

    Args:
        advantages: by rollout id, of those that are trained on.
        memory: the file with the texts of the tips. Those that it does not have are null.
    """
    rows: list[CallRow] = []
    texts = _tip_texts(memory)
    for rollout in played:
        error, calls = reported_error(rollout.events), results.calls[rollout.rollout_id]
        dropped, tag = results.dropped.get(rollout.rollout_id), RolloutTag.read(rollout.metadata)
        example = dropped.error if dropped else None
        same = {
            "rollout": rollout.rollout_id,
            "group": rollout.data_id,
            "step": step,
            "phase": phase,
            "mode": mode_of(rollout).name,
            "scope": tag.scope if tag else None,
            "return": rollout.final_reward,
            "advantage": advantages.get(rollout.rollout_id),
            "dropped": dropped.reason if dropped else None,
            "enqueued": rollout.enqueue_time,
            "started": rollout.running_at,
            "ended": rollout.finished_at,
        }
        said = redacted(
            {
                "task": rollout.input,
                "cause": error.cause if error and dropped else example,
                "example": example,
                "error": str(error or rollout.error_message or "") or None,
                "output": error.output if error else None,
                "calls": [*_said(calls, texts)],
            }
        )
        of_calls = zip(said.pop("calls"), _measured(calls), strict=True)
        rows += [same | said | words | numbers for words, numbers in of_calls] or [same | said]
    return rows


def _tip_texts(memory: Path) -> dict[int, str]:
    try:
        with reading(memory) as db:
            return {tip.id: tip.text for tip in stored_tips(db, order="newest")}
    except MemoryFileError:  # there is none, or it is on the gateway's machine
        return {}


def _said(calls: Sequence[PlayedCall], texts: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield of each call the messages that the one before it did not have, the reply, and the texts of its tips."""
    before: list[Message] = []
    room = _ROLLOUT_CHARACTERS
    for call in calls:
        request, response = call.data["request"], call.data["response"]
        messages = request.get("messages") or [{"role": "user", "content": str(request.get("prompt", ""))}]
        extends = messages[: len(before)] == before
        new = _short(messages[len(before) :] if extends else messages)
        size = len(str(new))
        before, room = messages, room - size
        refused = call.data.get("status") != "ok"
        yield {
            "messages": new if room > 0 else [{"role": "", "content": f"({size} characters are not kept)"}],
            "anew": not extends,
            "reply": _short(reply_of(response)),
            "problem": f"HTTP {call.data.get('http_status')}: {_short(response)}" if refused else None,
            "tips": [texts.get(tip) for tip in call.event.tip_ids] if call.event else [],
        }


def _measured(calls: Sequence[PlayedCall]) -> Iterator[dict[str, Any]]:
    """Yield the tokens of each call, of its prompt those that the call before it did not have, and its numbers."""
    before: list[int] = []
    for number, call in enumerate(calls):
        yield {
            "call": number,
            "begun": call.begun,
            "seconds": call.seconds,
            "finish_reason": call.data.get("finish_reason"),
            "prompt_tokens": len(call.prompt),
            "prompt_ids": np.array(call.prompt[shared(before, call.prompt) :], np.int32),
            "response_ids": np.array(call.reply, np.int32),
            "log_probs": None if call.log_probs is None else np.array(call.log_probs, np.float32),
            "trained": np.zeros(len(call.reply), bool),
            "tip_ids": call.event.tip_ids if call.event else [],
            "visits": call.event.visits if call.event else None,
            "intrinsic": call.intrinsic,
            "version": call.data.get("server", {}).get("version"),
        }
        before = call.prompt + call.reply


def _short(value: Any) -> Any:
    """Return a JSON-like value with the middle of long texts left out."""
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    if isinstance(value, str) and len(value) > _TEXT_CHARACTERS:
        half = _TEXT_CHARACTERS // 2
        return f"{value[:half]}\n... {len(value) - 2 * half} characters are not kept ...\n{value[-half:]}"
    return value


def episode_record(
    step: int, batch: DataProto, results: Results, masked: torch.Tensor, known: torch.Tensor, tokenizer: Any
) -> dict[str, Any]:
    """Return a line of ``episodes.jsonl``, for `empo2 report`: one row that was trained, the first one of its episode.

    Without secrets. It is one with an advantage or a teacher if there is any, rather off-policy, rather with memory.
    ``spans`` are ``[kind, text, tokens]``, at most 4,000 tokens in all; a kind is ``read``, ``trained`` or ``masked``.

    Args:
        batch: with its advantages.
        masked: [rows, tokens], bool: those of the responses that the update masked.
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


class RunRecords:
    """Writes into a run's folder. A script of the user's own has none, and nothing is written."""

    def __init__(self, folder: str | None, run: Run, tokenizer: Any) -> None:
        self._folder = Path(folder) if folder else None
        self._run = run
        self._tokenizer = tokenizer
        self._unwritten: list[CallRow] = []
        self.controller_log = self._folder and self._folder / "controller.log"

    def note_rollouts(
        self, manager: Empo2RolloutManager, step: int, phase: Phase, advantages: Mapping[str, float]
    ) -> None:
        """Note the rollouts that were played, which `write_rollouts` writes, and let go of their events.

        Args:
            advantages: by rollout id, of those that are trained on.
        """
        played, manager.played = manager.played, []
        if self._folder is not None:
            memory = self._folder / run_folder.MEMORY_FILE
            self._unwritten = call_rows(played, manager.results, step, phase, advantages, memory)
        manager.results.calls.clear()

    def note_update(
        self, step: int, batch: DataProto, results: Results, masked: torch.Tensor, updated: torch.Tensor
    ) -> None:
        """Note which tokens the update masked, and write the step's episode; arguments as `what_was_masked` returns."""
        if self._folder is None:
            return
        known = updated | ~batch.batch["off_policy"]
        add_masks(self._unwritten, results, batch, masked, known)
        record = episode_record(step, batch, results, masked, known, self._tokenizer)
        with (self._folder / run_folder.EPISODES_FILE).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def write_rollouts(self) -> None:
        """Write the rollouts that are noted; the run goes on where that fails."""
        rows, self._unwritten = self._unwritten, []
        if self._folder is None or not rows:
            return
        try:
            write_rollouts(self._folder / run_folder.ROLLOUTS, rows, self._run.keep_rollouts)
        except (OSError, ValueError, TypeError) as error:  # such as a full disk
            say_note(f"step {rows[0]['step']}: WARNING: its rollouts are not kept: {error}")
