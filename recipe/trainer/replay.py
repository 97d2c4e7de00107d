"""Stored successes with tips, which later steps train again without their tips; docs/algorithm.md, "Replay"."""

import math
import random
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad
from verl import DataProto

from empo2.recipe.config import Algorithm
from empo2.recipe.json_text import dumped
from empo2.recipe.marked_lines import say_note
from empo2.recipe.protocol import is_success
from empo2.recipe.trainer.step_results import Results

_STORED = 256  # tasks; of a rollout of 6,000 sampled tokens the teachers take a megabyte


class Replay:
    """The distilled rows of one success of each task, of the tasks that succeeded last.

    It is the one of whose tokens the policy with tips was surest: a teacher that succeeds by luck teaches what it would
    rather have done. The teacher is that of the step that played it: a KL has no ratio, so that rows may be old.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._rows: dict[bytes, DataProto] = {}  # by task, that of the last success last

    def drawn(self, step: int) -> list[DataProto]:
        """Return the rows of the tasks that a step replays, of all that are stored if there are fewer."""
        stored = list(self._rows.values())
        count = min(self._algorithm.replayed_tasks, len(stored))
        return random.Random(f"{self._algorithm.seed} {step}").sample(stored, count)

    def store(self, batch: DataProto, results: Results) -> None:
        """Store the distilled rows of rollouts that succeeded.

        Args:
            batch: all rows of a step, as `rows.distill` leaves them.
        """
        ids, distilled = batch.non_tensor_batch["rollout_id_list"], batch.batch["distilled"].numpy()
        for rollout, result in results.items():
            rows = np.flatnonzero((ids == rollout) & distilled)
            if len(rows) and is_success(result.return_, self._algorithm.success_return):
                task, new = dumped(result.task, sort_keys=True), batch.select_idxs(rows)
                self._rows[task] = max(new, self._rows.pop(task, new), key=_sureness)
        for task in [*self._rows][:-_STORED]:
            del self._rows[task]

    def save(self, file: Path) -> None:
        torch.save(self._rows, file)

    def load(self, file: Path, prompt: int, response: int) -> None:
        """Load what was stored, without rows of other widths, which the run had under other limits."""
        stored: dict[bytes, DataProto] = torch.load(file, weights_only=False)
        self._rows = {task: rows for task, rows in stored.items() if _widths(rows) == (prompt, response)}
        if lost := len(stored) - len(self._rows):
            said = "model.max_prompt_tokens or model.max_episode_tokens was another when they were played"
            say_note(f"{lost} of {len(stored)} stored successes are not replayed: {said}")


def _widths(rows: DataProto) -> tuple[int, int]:
    return rows.batch["prompts"].shape[1], rows.batch["responses"].shape[1]


def _sureness(rows: DataProto) -> float:
    """Return the mean log-prob of the sampled tokens."""
    mask = rows.batch["response_mask"]
    return float((rows.batch["rollout_log_probs"] * mask).sum() / mask.sum())


def joined(batch: DataProto, others: list[DataProto]) -> DataProto:
    """Return the rows of a step, and after them those of earlier ones, with room for the teachers of all."""
    if not others:
        return batch
    parts = [batch, *others]
    width = max(part.batch["teacher_log_probs"].shape[1] for part in parts)
    names = {key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in batch.non_tensor_batch}
    made = DataProto.from_dict({key: _column(parts, str(key), width) for key in batch.batch.keys()}, names)  # noqa: SIM118
    made.meta_info = batch.meta_info | {"global_token_num": made.batch["attention_mask"].sum(-1).tolist()}
    return made


def _column(parts: list[DataProto], key: str, width: int) -> torch.Tensor:
    columns = [part.batch[key] for part in parts]
    if key.startswith("teacher_"):
        nothing = -math.inf if key == "teacher_log_probs" else 0
        columns = [pad(column, (0, 0, 0, width - column.shape[1]), value=nothing) for column in columns]
    return torch.cat(columns)
