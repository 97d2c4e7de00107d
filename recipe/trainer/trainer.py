"""agent-lightning's trainer with EMPO²'s draws, rows and objective."""

# pyright: reportPrivateImportUsage=false
import json
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from agentlightning.verl.agl_rollout_manager import AglRolloutManagerBase
from agentlightning.verl.per_rollout_loss import PER_ROLLOUT_MEAN_LOSS_MODE
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from omegaconf import OmegaConf
from verl import DataProto
from verl.utils.config import omega_conf_to_dataclass

from empo2.recipe import baselines, preemption, run_folder
from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError, NoUsableRollouts
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.marked_lines import say_note
from empo2.recipe.rollout_log import CallRow, Phase, write_rollouts
from empo2.recipe.trainer.advantages import (
    range_warning,
    rollout_advantages,
    tip_gain,
    tolerance_warning,
    worth_imitating,
)
from empo2.recipe.trainer.compat.agentlightning import count_mini_batches_in_rows
from empo2.recipe.trainer.manager import Empo2RolloutManager, vocabulary_of
from empo2.recipe.trainer.objective import by_kind, hybrid_loss
from empo2.recipe.trainer.row_text import episode_record
from empo2.recipe.trainer.rows import add_masks, distill, groups_without_gradient, set_advantages, update_results
from empo2.recipe.trainer.shown_rollouts import call_rows
from empo2.recipe.trainer.step_results import StepResults, staleness
from empo2.recipe.trainer.tracking import name_sums, step_line, training_metrics, validation_metrics
from empo2.recipe.trainer.updates import fill_up, planned_batch

RolloutManagerT = TypeVar("RolloutManagerT", bound=AglRolloutManagerBase)

_ATTEMPTS_PER_STEP = 3


class Empo2Trainer(AgentLightningRayPPOTrainer):
    """agent-lightning's trainer (1.0.2) with its methods overridden where EMPO² differs."""

    _manager: Empo2RolloutManager  # of the current or the last batch of rollouts

    def __init__(self, *args: Any, settings: Settings, gateway: GatewayClient, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._gateway = gateway
        self._version = 0  # updates that vLLM's weights have had
        self._validated: list[StepResults] = []
        self._unwritten: list[CallRow] = []  # of the current batch of rollouts
        for key, needed in (
            ("actor_rollout_ref.actor.policy_loss.loss_mode", PER_ROLLOUT_MEAN_LOSS_MODE),
            ("agentlightning.trace_aggregator.level", "trajectory"),
            ("algorithm.adv_estimator", "grpo"),
            ("algorithm.enable_rollout_level_advantage", True),
            ("algorithm.norm_adv_by_std_in_grpo", settings.algorithm.normalize_by_std),
        ):
            if (given := OmegaConf.select(self.config, key)) != needed:
                raise ConfigError(
                    f"{key}={given!r} in agent-lightning's and verl's configuration: must be {needed!r}, since EMPO² "
                    "makes the rows and the advantages; its settings are algorithm.baseline and "
                    "algorithm.normalize_by_std"
                )
        self._group_size = count_mini_batches_in_rows(self.config)
        if self.is_async:  # tasks are drawn ahead, so that their epochs are over before the steps are
            self.config.trainer.total_epochs = sys.maxsize

    def init_workers(self) -> None:
        super().init_workers()
        actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        algorithm = self._settings.algorithm
        loss: dict[str, Any] = {
            "mask_threshold": 0.0 if algorithm.distills else algorithm.mask_threshold,  # a ratio's, which is not there
            "gap_limit": math.inf if algorithm.log_prob_gap_limit is None else algorithm.log_prob_gap_limit,
            "distillation": algorithm.distillation_coefficient,
            "reverse": algorithm.off_policy_loss == "reverse-distillation",
            "kl_with_tips": algorithm.kl_rows == "with-tips",
        }
        self.actor_rollout_wg.set_loss_fn(partial(hybrid_loss, config=actor_config, **loss))

    @property
    def _run_directory(self) -> Path | None:
        """Return the run's folder; None in a script of the user's own."""
        directory = (self.config.get("empo2") or {}).get("run_directory")
        return Path(directory) if directory else None

    # Rollouts

    def _make_rollout_manager(self, manager_cls: type[RolloutManagerT]) -> RolloutManagerT:
        make: Any = partial(
            Empo2RolloutManager,
            settings=self._settings,
            gateway=self._gateway,
            group_size=self._group_size,
            max_prompt_tokens=self.config.agentlightning.trace_aggregator.trajectory_max_prompt_length,
            vocabulary=vocabulary_of(self.config.actor_rollout_ref.model.path),
            version=self._version,
            pauses=self.is_async,
            controller_log=self._run_directory and self._run_directory / "controller.log",
        )
        self._manager = manager = super()._make_rollout_manager(make)
        return manager

    def _resume_gateway(self) -> None:
        """Do nothing: the manager resumes it, once the model servers are registered."""

    def _pause_and_drain_gateway(self, *, reason: str) -> dict[str, Any]:
        """Return the metrics of the pause, which the manager made as soon as its groups had ended."""
        return self._manager.pause_metrics

    @property
    def _results(self) -> StepResults:
        return self._manager.results

    def _rollout(self, gen_batch: DataProto, is_train: bool) -> tuple[DataProto, dict[str, Any]]:
        self._version = self.global_steps - is_train  # validation comes after the step's update
        try:
            batch, metrics = super()._rollout(gen_batch, is_train)
        except NoUsableRollouts as error:
            if not self.is_async:
                self._abort_all_rollout_requests()  # pyright: ignore[reportUnusedCoroutine]
            if is_train:
                self._carry_over_rollouts = self._manager.carried_over
                raise
            print(f"validation: {error}", flush=True)
            batch, metrics = DataProto(batch=None), {}
        if not is_train:
            self._note_rollouts("validation", {})
            self._write_rollouts()
            self._validated.append(self._results)
            return batch, metrics
        algorithm, results = self._settings.algorithm, self._results
        trained = results.kept
        paper = baselines.asked_for(self._settings, "algorithm.advantage")
        advantages = rollout_advantages(trained, algorithm)
        set_advantages(batch, trained, advantages)
        if paper:
            metrics |= paper.add_turn_advantages(batch, results, algorithm)
        if algorithm.distills and batch.batch["off_policy"].any():
            metrics |= distill(batch, worth_imitating(trained, algorithm), results)
        self._note_rollouts("training", advantages)
        sampled = sum(result.reply_tokens for result in trained.values())
        metrics |= training_metrics(results, algorithm.success_return) | self._manager.metrics
        metrics |= {
            "empo2/unmerged_rollouts": metrics["training/n_unmerged_rollouts"],
            "empo2/groups_without_gradient": groups_without_gradient(batch),
            "empo2/cut_rows": metrics["training/n_truncated_sample"],
            "empo2/off_policy_rows": int(batch.batch["off_policy"].sum()),
            "empo2/reply_tokens_lost": sampled - int(batch.batch["response_mask"].sum()),
        }
        if self.is_async:
            metrics |= staleness(trained, self._version)
        if (gain := tip_gain(trained, algorithm)) is not None:
            metrics["empo2/tip_gain"] = gain
        print(step_line(self.global_steps, metrics, rollouts=len(trained), rows=len(batch)), flush=True)
        if self.global_steps == 1:
            warnings = [range_warning(trained, algorithm), paper.warning(metrics) if paper else ""]
            if metrics["empo2/groups_without_gradient"] == 1:
                warnings.append(tolerance_warning(trained, algorithm))
            for warning in filter(None, warnings):
                print(f"step 1: {warning}", flush=True)
        return batch, metrics

    def _note_rollouts(self, phase: Phase, advantages: Mapping[str, float]) -> None:
        """Note what `_write_rollouts` writes of the current batch, and forget its events."""
        played, self._manager.played = self._manager.played, []
        if (run := self._run_directory) is not None:
            memory = run / run_folder.MEMORY_FILE
            self._unwritten = call_rows(played, self._results, self.global_steps, phase, advantages, memory)
        self._results.calls.clear()

    def _write_rollouts(self) -> None:
        """Write the rollouts that are noted to the run's folder; the run goes on where that fails."""
        rows, self._unwritten = self._unwritten, []
        if (run := self._run_directory) is None or not rows:
            return
        try:
            write_rollouts(run / run_folder.ROLLOUTS, rows, self._settings.run.keep_rollouts)
        except (OSError, ValueError, TypeError) as error:  # such as a full disk
            say_note(f"step {self.global_steps}: WARNING: its rollouts are not kept: {error}")

    # Optimization

    def _train_step(
        self, timing_raw: dict[str, float], curr_step_profile: bool
    ) -> tuple[dict[str, Any], DataProto] | None:
        if preemption.came():  # since the last step
            self.global_steps -= 1
            self._end_with_this_step()
            directory = Path(self.config.trainer.default_local_dir).absolute()
            if not run_folder.is_complete(run_folder.checkpoint_folder(directory, self.global_steps)):
                self._save_checkpoint()
            return None
        preemption.save_first()
        attempt, lost = 1, 0
        while True:
            try:
                result = super()._train_step(timing_raw, curr_step_profile)
                break
            except NoUsableRollouts as error:
                self._note_rollouts("training", {})
                print(f"step {self.global_steps}, attempt {attempt} of {_ATTEMPTS_PER_STEP}: {error}", flush=True)
                if attempt == _ATTEMPTS_PER_STEP:
                    raise
                attempt += 1
                lost += len(self._results.dropped)
            finally:  # an update that fails leaves what was played
                self._write_rollouts()
        assert result is not None, "no row is dropped (count_mini_batches_in_rows)"
        if preemption.came():
            self._end_with_this_step()
        if self.is_async and self.global_steps >= self.total_training_steps:
            self._manager.drop_carried_over()  # the last validation has the model servers for itself
        metrics, batch = result
        metrics["empo2/step_attempts"] = attempt
        metrics["empo2/rollouts_dropped"] += lost
        # The mean of the sampled log-probs estimates the entropy without a pass over the vocabulary.
        mask, surprise = batch.batch["response_mask"], -batch.batch["rollout_log_probs"]
        metrics["actor/entropy"] = float((surprise * mask).sum() / mask.sum())
        for kind, rows in by_kind(batch.batch["off_policy"], batch.batch["memory"]).items():
            if rows.any():
                metrics[f"empo2/{kind}/entropy"] = float((surprise * mask)[rows].sum() / mask[rows].sum())
        return metrics, batch

    def _end_with_this_step(self) -> None:
        """Let `fit` save a checkpoint, write down the metrics and return, without a validation."""
        self.total_training_steps = self.global_steps
        self.config.trainer.test_freq, self.config.trainer.save_freq = -1, 1

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        """Return log π_old: vLLM's log-probs on the prompts as sent, tips included, without a second forward pass.

        With ``off_policy_old_log_probs: tip-free`` the off-policy rows get the log-probs of the policy before the
        update on their tip-free prompts instead (the paper's Algorithm 1): their ratio then starts at 1.
        """
        old, flops = batch.batch["rollout_log_probs"], 0.0
        rows = batch.batch["off_policy"].nonzero(as_tuple=True)[0].tolist()
        if rows and self._settings.algorithm.off_policy_old_log_probs == "tip-free":
            output, flops = super()._compute_old_log_prob(fill_up(batch, rows, self._forward_multiple))
            old = old.clone()
            old[rows] = output.batch["old_log_probs"][: len(rows)]
        return DataProto.from_dict({"old_log_probs": old}), flops

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        reference = torch.zeros_like(batch.batch["rollout_log_probs"])
        if rows := self._kl_rows(batch).nonzero(as_tuple=True)[0].tolist():
            output = super()._compute_ref_log_prob(fill_up(batch, rows, self._forward_multiple))
            reference[rows] = output.batch["ref_log_prob"][: len(rows)]
        return DataProto.from_dict({"ref_log_prob": reference})

    def _kl_rows(self, batch: DataProto) -> torch.Tensor:
        """Return which rows have the KL to the first weights, [rows], bool."""
        with_tips = by_kind(batch.batch["off_policy"], batch.batch["memory"])["with_tips"]
        return with_tips if self._settings.algorithm.kl_rows == "with-tips" else torch.ones_like(with_tips)

    @property
    def _forward_multiple(self) -> int:
        """Return the divisor of the rows of a forward pass without gradient: a micro-batch on every GPU."""
        sections = (self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.ref)
        micro_batch = math.lcm(*(section.log_prob_micro_batch_size_per_gpu or 1 for section in sections))
        return self.resource_pool_manager.get_n_gpus() * micro_batch

    def _update_actor(self, batch: DataProto) -> DataProto:
        actor = self.config.actor_rollout_ref.actor
        rows, width = batch.batch["response_mask"].shape
        batch.batch["first_index"] = torch.arange(rows) * width
        planned, size = planned_batch(
            batch,
            updates=self._settings.algorithm.updates_per_step,
            ranks=self.resource_pool_manager.get_n_gpus(),
            micro_batch=actor.ppo_micro_batch_size_per_gpu or 1,
            other_terms=actor.entropy_coeff != 0 or (actor.use_kl_loss and self._kl_rows(batch)),
        )
        actor.ppo_mini_batch_size = size
        output = super()._update_actor(planned)
        actor.ppo_mini_batch_size = 1  # as `count_mini_batches_in_rows` set it, for the next step
        metrics = output.meta_info["metrics"]
        masked = torch.zeros(rows, width, dtype=torch.bool)
        masked.view(-1)[torch.tensor(metrics.pop("actor/masked_at"), dtype=torch.long)] = True
        updated = torch.zeros(rows, dtype=torch.bool)  # the others were left out: their groups have no gradient
        updated[planned.batch["first_index"][planned.batch["token_weight"] > 0] // width] = True
        known = updated | ~batch.batch["off_policy"]
        self._gateway.updated(self.global_steps, update_results(batch, self._results, masked, updated))
        if (directory := self._run_directory) is not None:
            results = self._results.kept
            add_masks(self._unwritten, results, batch, masked, known)
            record = episode_record(self.global_steps, batch, results, masked, known, self.tokenizer)
            with (directory / run_folder.EPISODES_FILE).open("a") as file:
                file.write(json.dumps(record) + "\n")
        name_sums(metrics)
        metrics["empo2/updates"] = [len(planned) // size]
        return output

    # Validation and checkpoints

    def _validate(self, merged: bool = False) -> dict[str, Any]:
        """Validate, including every batch (agent-lightning keeps only the last) and every failure."""
        self._validated = []
        return super()._validate(merged) | validation_metrics(self._validated, self._settings.algorithm)

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        directory = Path(self.config.trainer.default_local_dir).absolute()
        folder = run_folder.checkpoint_folder(directory, self.global_steps)
        if self._settings.algorithm.name == "empo2":
            self._gateway.snapshot(folder / run_folder.MEMORY_FILE)
        run_folder.mark_complete(folder)
        if keep := self.config.trainer.max_actor_ckpt_to_keep:
            run_folder.remove_old_checkpoints(directory, keep)

    def _load_checkpoint(self) -> Any:
        result = super()._load_checkpoint()
        if self.global_steps > 0 and self._settings.algorithm.name == "empo2":
            trainer = self.config.trainer
            folder = run_folder.checkpoint_folder(Path(trainer.default_local_dir).absolute(), self.global_steps)
            if trainer.resume_mode == "resume_path":
                folder = Path(trainer.resume_from_path).absolute()
            self._gateway.restore(folder / run_folder.MEMORY_FILE)
        return result
