"""What a run's folder keeps of each step: the rollouts that were played, and one trained episode as text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from verl import DataProto

from empo2.recipe import run_folder
from empo2.recipe.config import Run
from empo2.recipe.marked_lines import say_note
from empo2.recipe.rollout_log import CallRow, Phase, write_rollouts
from empo2.recipe.trainer.manager import Empo2RolloutManager
from empo2.recipe.trainer.row_text import episode_record
from empo2.recipe.trainer.rows import add_masks
from empo2.recipe.trainer.shown_rollouts import call_rows
from empo2.recipe.trainer.step_results import Results


class RunRecords:
    """Writes into a run's folder. A script of the user's own has none, and nothing is written."""

    def __init__(self, folder: str | None, run: Run, tokenizer: Any) -> None:
        self._folder = Path(folder) if folder else None
        self._run = run
        self._tokenizer = tokenizer
        self._unwritten: list[CallRow] = []

    @property
    def controller_log(self) -> Path | None:
        return self._folder and self._folder / "controller.log"

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

    def write_rollouts(self, step: int) -> None:
        """Write the rollouts that are noted; the run goes on where that fails."""
        rows, self._unwritten = self._unwritten, []
        if self._folder is None or not rows:
            return
        try:
            write_rollouts(self._folder / run_folder.ROLLOUTS, rows, self._run.keep_rollouts)
        except (OSError, ValueError, TypeError) as error:  # such as a full disk
            say_note(f"step {step}: WARNING: its rollouts are not kept: {error}")
