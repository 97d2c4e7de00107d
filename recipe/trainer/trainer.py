"""agent-lightning's trainer with EMPO²'s draws, rows and objective; the entry point behind ``run_empo2``."""

# pyright: reportPrivateImportUsage=false
import importlib
import json
import math
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported
from empo2.recipe.trainer.compat import verl as _compat  # noqa: F401  a script that composes its configuration has imported verl already

# isort: split
import agentlightning.verl.trainer as agl_trainer
import numpy as np
import torch
from agentlightning.verl.agl_rollout_manager import AglRolloutManagerBase
from agentlightning.verl.dataset import LoadedDataset
from agentlightning.verl.per_rollout_loss import PER_ROLLOUT_MEAN_LOSS_MODE
from omegaconf import DictConfig, OmegaConf, open_dict
from verl import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tracking import Tracking
from verl.workers.rollout.llm_server import LLMServerManager

from empo2.recipe.config import Settings, load_settings
from empo2.recipe.errors import ConfigError, GatewayError, NoUsableRollouts
from empo2.recipe.protocol import scope_of
from empo2.recipe.run_folder import MEMORY_FILE, METRICS_FILE, checkpoint_folder, mark_complete, remove_old_checkpoints
from empo2.recipe.trainer.manager import MEMORY, OFF_POLICY, Empo2RolloutManager, Outcomes
from empo2.recipe.trainer.objective import hybrid_loss
from empo2.recipe.trainer.rows import exact_rows, weightless_fillers, whole_mini_batches, without_fillers

RolloutManagerT = TypeVar("RolloutManagerT", bound=AglRolloutManagerBase)

_ATTEMPTS_PER_STEP = 3
_VLLM_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


class Empo2Trainer(agl_trainer.AgentLightningRayPPOTrainer):
    """EMPO² in the places that agent-lightning 1.0.2 leaves open; everything else is agent-lightning's and verl's."""

    def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        actor = self.config.actor_rollout_ref.actor
        self._planned_mini_batch_tasks = int(actor.ppo_mini_batch_size)
        if self.is_async:
            raise ConfigError(
                "agentlightning.async_rollout.enabled=True: EMPO² draws modes step by step; set it to false"
            )
        if actor.policy_loss.loss_mode != PER_ROLLOUT_MEAN_LOSS_MODE:
            raise ConfigError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={actor.policy_loss.loss_mode!r}: EMPO² is defined on "
                f"{PER_ROLLOUT_MEAN_LOSS_MODE!r}"
            )

    def init_workers(self) -> None:
        # agent-lightning's gateway chooses among the servers; verl's balancer would be an idle process.
        LLMServerManager._init_global_load_balancer = _no_load_balancer
        super().init_workers()
        actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(
            partial(hybrid_loss, config=actor_config, mask_threshold=self._settings.algorithm.mask_threshold)
        )

    # Rollouts

    def _make_rollout_manager(self, manager_cls: type[RolloutManagerT]) -> RolloutManagerT:
        manager = super()._make_rollout_manager(Empo2RolloutManager)
        manager.begin(
            self._settings.algorithm, self._settings.memory.scope, drain_seconds=self._settings.reflection.timeout
        )
        self._manager = manager
        return manager  # type: ignore[return-value]

    def _rollout(self, gen_batch: DataProto, is_train: bool) -> tuple[DataProto, dict[str, Any]]:
        try:
            batch, metrics = super()._rollout(gen_batch, is_train)
        except NoUsableRollouts:
            self._abort_all_rollout_requests()  # pyright: ignore[reportUnusedCoroutine]
            raise
        if not is_train:
            return batch, metrics
        outcomes = self._manager.outcomes
        metrics.update(_rollout_metrics(outcomes, self._settings.algorithm.success_return))
        metrics.update(self._manager.gateway_metrics)
        metrics["empo2/unmerged_rollouts"] = metrics["training/n_unmerged_rollouts"]
        kept = exact_rows(batch, outcomes, self._settings.algorithm)
        metrics["empo2/overlong_rows"] = len(batch) - len(kept)
        metrics["empo2/off_policy_rows"] = int(kept.batch["off_policy"].sum())
        actor_rollout = self.config.actor_rollout_ref
        batch, mini_batch_tasks = whole_mini_batches(
            kept,
            group=actor_rollout.rollout.n,
            gpus=self.resource_pool_manager.get_n_gpus(),
            planned_tasks=self._planned_mini_batch_tasks,
        )
        actor_rollout.actor.ppo_mini_batch_size = mini_batch_tasks  # _train_step and _update_actor read it
        return batch, metrics

    # Optimisation

    def _train_step(
        self, timing_raw: dict[str, float], curr_step_profile: bool
    ) -> tuple[dict[str, Any], DataProto] | None:
        attempt, lost = 1, 0
        while True:
            try:
                result = super()._train_step(timing_raw, curr_step_profile)
                break
            except NoUsableRollouts as error:
                print(f"step {self.global_steps}, attempt {attempt} of {_ATTEMPTS_PER_STEP}: {error}", flush=True)
                if attempt == _ATTEMPTS_PER_STEP:
                    raise
                attempt += 1
                lost += self._manager.outcomes.dropped.total()
        assert result is not None, "mini-batches are sized to the rows (whole_mini_batches)"
        metrics, batch = result
        metrics["empo2/step_attempts"] = attempt
        metrics["empo2/rollouts_dropped"] += lost
        if batch.batch["filler"].any():
            batch, real = without_fillers(batch)
            metrics.update(real)
        # What was sampled has log-probs already: their mean estimates the entropy without a pass over the vocabulary.
        mask = batch.batch["response_mask"]
        metrics["actor/entropy"] = -float((batch.batch["rollout_log_probs"] * mask).sum() / mask.sum())
        return metrics, batch

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        """π_old is what vLLM sampled from, tips and all: no second forward pass (and no model flops)."""
        return DataProto.from_dict({"old_log_probs": batch.batch["rollout_log_probs"]}), 0.0

    def _update_actor(self, batch: DataProto) -> DataProto:
        output = super()._update_actor(weightless_fillers(batch))
        _rename_sums(output.meta_info["metrics"])
        return output

    # Validation and checkpoints

    def _validate(self, merged: bool = False) -> dict[str, Any]:
        """agent-lightning's validation, without memory, counting every batch (upstream keeps only the last)."""
        outcomes: list[Outcomes] = []
        rollout = self._rollout

        def collect(gen_batch: DataProto, is_train: bool) -> tuple[DataProto, dict[str, Any]]:
            try:
                return rollout(gen_batch, is_train)
            except NoUsableRollouts as error:
                print(f"validation: {error}", flush=True)
                return DataProto(batch=None), {}
            finally:
                outcomes.append(self._manager.outcomes)

        self._rollout = collect  # type: ignore[method-assign]
        try:
            metrics = super()._validate(merged)
        finally:
            del self._rollout
        returns = [value for batch in outcomes for value in batch.returns.values()]
        metrics["val/rollouts_dropped"] = sum(batch.dropped.total() for batch in outcomes)
        metrics["val/n_rollouts"] = len(returns)
        if returns:
            metrics["val/return"] = float(np.mean(returns))
            success = self._settings.algorithm.success_return
            metrics["val/success_rate"] = float(np.mean([value >= success for value in returns]))
        return metrics

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        directory = Path(self.config.trainer.default_local_dir).absolute()
        folder = checkpoint_folder(directory, self.global_steps)
        if self._settings.algorithm.name == "empo2":
            self._ask_gateway("snapshot", folder / MEMORY_FILE)
        mark_complete(folder)
        if keep := self.config.trainer.max_actor_ckpt_to_keep:
            remove_old_checkpoints(directory, keep)

    def _load_checkpoint(self) -> Any:
        result = super()._load_checkpoint()
        if self.global_steps > 0 and self._settings.algorithm.name == "empo2":
            trainer = self.config.trainer
            folder = checkpoint_folder(Path(trainer.default_local_dir).absolute(), self.global_steps)
            if trainer.resume_mode == "resume_path":
                folder = Path(trainer.resume_from_path).absolute()
            self._ask_gateway("restore", folder / MEMORY_FILE)
        return result

    def _ask_gateway(self, verb: str, file: Path) -> None:
        response = self._ensure_agl_client().post(f"/empo2/{verb}", json={"path": str(file)}, timeout=None)
        if response.status_code == 409:
            raise GatewayError(f"the gateway cannot {verb} the memory: {response.json()['detail']}")
        response.raise_for_status()


async def _no_load_balancer(self: LLMServerManager) -> None:
    self.global_load_balancer = None  # pyright: ignore[reportAttributeAccessIssue]


def _rollout_metrics(outcomes: Outcomes, success_return: float) -> dict[str, float]:
    returns, modes = list(outcomes.returns.values()), list(outcomes.modes.values())
    metrics = {
        "training/return": np.mean(returns),
        "training/return_std": np.std(returns),
        "training/success_rate": np.mean([value >= success_return for value in returns]),
        "training/intrinsic_return": np.mean(list(outcomes.intrinsic.values())),
        "empo2/rollout_mode": np.mean([mode.rollout == MEMORY for mode in modes]),
        "empo2/update_mode": np.mean([mode.update == OFF_POLICY for mode in modes]),
        "empo2/rollouts_dropped": outcomes.dropped.total(),
        "empo2/turns_dropped": outcomes.turns_dropped,
    }
    metrics.update({f"empo2/dropped/{reason}": count for reason, count in outcomes.dropped.items()})
    return {key: float(value) for key, value in metrics.items()}


def _rename_sums(metrics: dict[str, Any]) -> None:
    """The loss's sums -> the fractions that a reader wants; verl puts ``actor/`` before every name."""
    sums = {
        name: float(np.sum(metrics.pop(f"actor/{name}")))
        for name in ("off_policy_tokens", "masked_tokens", "compared_rows", "log_ppl_gap")
    }
    metrics["empo2/masked_token_fraction"] = [sums["masked_tokens"] / max(sums["off_policy_tokens"], 1)]
    if sums["compared_rows"]:
        metrics["rollout_corr/log_ppl_abs_diff"] = [sums["log_ppl_gap"] / sums["compared_rows"]]


class RunTracking(Tracking):
    """verl's loggers, and one line a step in the run folder's metrics.jsonl (verl's file logger overwrites)."""

    def __init__(self, *args: Any, config: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        directory = config.get("empo2", {}).get("run_directory")
        self._file = Path(directory) / METRICS_FILE if directory else None

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        super().log(data=data, step=step, backend=backend)
        if self._file is not None:
            line = {"step": step} | {key: _json_number(value) for key, value in data.items()}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _json_number(value: Any) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def train(config: DictConfig, train_dataset: Sequence[Any], val_dataset: Sequence[Any]) -> None:
    """See ``empo2.recipe.run_empo2``. The trainer runs in this process; Ray holds verl's and vLLM's workers."""
    layer: Any = OmegaConf.to_container(config.get("empo2") or OmegaConf.create({}), resolve=True)
    run_directory = layer.pop("run_directory", None)
    settings = load_settings(layer=layer)
    for name, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
        if len(dataset) == 0:
            raise ConfigError(f"{name} is empty: there is no task to play")
    if settings.algorithm.name == "empo2":
        for task in train_dataset:
            scope_of(task, settings.memory.scope)
    with open_dict(config):
        config.empo2 = settings.to_dict() | ({"run_directory": run_directory} if run_directory else {})
    agl_trainer.Tracking = RunTracking  # fit() makes its own logger
    if not torch.cuda.is_available():
        # verl's driver imports vLLM for the name of a class: 14 s that pass while the actor's process imports verl.
        threading.Thread(target=importlib.import_module, args=(_VLLM_SERVER,), daemon=True).start()
    trainer = _make_trainer(config, settings, LoadedDataset(train_dataset), LoadedDataset(val_dataset))
    trainer.init_workers()
    trainer.fit()


def _make_trainer(config: DictConfig, settings: Settings, train_set: Any, val_set: Any) -> Empo2Trainer:
    """What agent-lightning's ``_AglTaskRunner.run`` does, with our trainer (upstream hard-codes its own)."""
    from verl.trainer.main_ppo import TaskRunner, create_rl_sampler, need_critic, need_reference_policy, validate_config
    from verl.utils.dataset.rl_dataset import collate_fn
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

    OmegaConf.resolve(config)
    runner = TaskRunner()
    actor_rollout_cls, ray_worker_group_cls = runner.add_actor_rollout_worker(config)
    runner.add_critic_worker(config)
    runner.add_reward_model_resource_pool(config)
    runner.add_ref_policy_worker(config, actor_rollout_cls)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    path = config.actor_rollout_ref.model.path
    trust = config.data.get("trust_remote_code", False)
    return Empo2Trainer(
        settings=settings,
        config=config,
        tokenizer=hf_tokenizer(path, trust_remote_code=trust),
        processor=hf_processor(path, trust_remote_code=trust, use_fast=True),
        role_worker_mapping=runner.role_worker_mapping,
        resource_pool_manager=runner.init_resource_pool_mgr(config),
        ray_worker_group_cls=ray_worker_group_cls,
        train_dataset=train_set,
        val_dataset=val_set,
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, train_set),
    )
