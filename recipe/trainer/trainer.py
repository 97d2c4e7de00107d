"""agent-lightning's trainer with EMPO²'s step, and with what its own loop around the steps asks for."""

# pyright: reportPrivateImportUsage=false
import math
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from verl import DataProto
from verl.utils.config import omega_conf_to_dataclass

from empo2.recipe import preemption, run_folder
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.trainer.objective import hybrid_loss
from empo2.recipe.trainer.play import PlayingTrainer
from empo2.recipe.trainer.step import train_step
from empo2.recipe.trainer.tracking import validation_metrics


class Empo2Trainer(PlayingTrainer):
    """agent-lightning's ``fit`` (1.0.2) loops over the steps, logs, validates, saves; `train_step` is the step."""

    _metrics: dict[str, Any] | None = None  # of this step, which `fit` logs when it has saved

    def init_workers(self) -> None:
        super().init_workers()
        actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        algorithm = self.settings.algorithm
        loss: dict[str, Any] = {
            # The mask is part of the ratio; distilled rows have none.
            "mask_threshold": 0.0 if algorithm.distills else algorithm.mask_threshold,
            "gap_limit": math.inf if algorithm.log_prob_gap_limit is None else algorithm.log_prob_gap_limit,
            "distillation": algorithm.distillation_coefficient,
            "reverse": algorithm.off_policy_loss == "reverse-distillation",
            "kl_with_tips": algorithm.kl_rows != "all",
        }
        self.actor_rollout_wg.set_loss_fn(partial(hybrid_loss, config=actor_config, **loss))

    def _train_step(
        self, timing_raw: dict[str, float], curr_step_profile: bool
    ) -> tuple[dict[str, Any], DataProto] | None:
        if preemption.came():  # since the last step
            self.global_steps -= 1
            self._end_with_this_step()
            if not run_folder.is_complete(self._checkpoint):
                self._save_checkpoint()
            return None
        preemption.save_first()
        try:
            result = train_step(self, timing_raw, profile=curr_step_profile)
            self._metrics = result[0]
        finally:  # an update that fails leaves what was played
            self.records.write_rollouts()
        if preemption.came() and self.global_steps < self.total_training_steps:  # the last one ends as it would
            self._end_with_this_step()
        if self.is_async and self.global_steps >= self.total_training_steps:
            self.manager.drop_carried_over()  # the last validation has the model servers for itself
        return result

    def _end_with_this_step(self) -> None:
        """Let `fit` save a checkpoint, write down the metrics and return, without a validation."""
        self.total_training_steps = self.global_steps
        self.config.trainer.test_freq, self.config.trainer.save_freq = -1, 1

    def _validate(self, merged: bool = False) -> dict[str, Any]:
        """Validate with every batch of tasks (agent-lightning keeps only the last) and every failure."""
        played, metrics = [], dict[str, Any]()
        for batch in self.val_dataloader:
            tasks = DataProto.from_single_dict(batch)
            try:
                rollouts = self.play(tasks.repeat(self.config.actor_rollout_ref.rollout.val_kwargs.n), is_train=False)
                metrics |= self.adapter().get_test_metrics(rollouts, global_steps=self.global_steps)
            except NoUsableRollouts as error:
                print(f"validation: {error}", flush=True)
            self.records.note_rollouts(self.manager, self.global_steps, "validation", {})
            self.records.write_rollouts()
            played.append(self.manager.results)
        return metrics | validation_metrics(played, self.settings.algorithm)

    @property
    def _checkpoint(self) -> Path:
        """Return the folder of this step's checkpoint."""
        directory = Path(self.config.trainer.default_local_dir).absolute()
        return run_folder.checkpoint_folder(directory, self.global_steps)

    def _save_checkpoint(self) -> None:
        begin = perf_counter()
        keep = self.config.trainer.max_actor_ckpt_to_keep  # None: all
        # With 1, verl would remove the last one before this one has its memory and is marked as complete.
        self.config.trainer.max_actor_ckpt_to_keep = keep and max(2, keep)
        super()._save_checkpoint()
        self.config.trainer.max_actor_ckpt_to_keep = keep
        if self.settings.algorithm.name == "empo2":
            self.gateway.snapshot(self._checkpoint / run_folder.MEMORY_FILE)
        if self.settings.algorithm.replayed_tasks:
            self.replay.save(self._checkpoint / run_folder.REPLAY_FILE)
        run_folder.mark_complete(self._checkpoint)
        if keep:
            run_folder.remove_old_checkpoints(self._checkpoint.parent, keep)
        if self._metrics is not None:  # `fit` has copied its own timers already
            self._metrics["timing_s/save_checkpoint"] = perf_counter() - begin

    def _continue_epoch(self, order: dict[str, Any]) -> None:
        """Draw the tasks that the epoch has left; begin a new one where it has drawn more than there are by now."""
        self.train_dataloader.load_state_dict(order)
        try:
            self._train_dataloader_iter = iter(self.train_dataloader)
        except StopIteration:  # torchdata's sampler, on its way to where it was
            self.train_dataloader.next_iter_state = None

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps > 0:
            trainer, folder = self.config.trainer, self._checkpoint
            if trainer.resume_mode == "resume_path":
                folder = Path(trainer.resume_from_path).absolute()
            # verl leaves it out at the end of an epoch, and would draw the tasks in the first one's order again.
            if (order := folder / "data.pt").exists():
                self._continue_epoch(torch.load(order, weights_only=False))
            if self.settings.algorithm.name == "empo2":
                self.gateway.restore(folder / run_folder.MEMORY_FILE)
            if (stored := folder / run_folder.REPLAY_FILE).exists():
                limits = self.config.agentlightning.trace_aggregator
                self.replay.load(stored, limits.trajectory_max_prompt_length, limits.trajectory_max_response_length)
