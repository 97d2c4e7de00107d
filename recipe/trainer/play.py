"""Play rollouts with the weights that vLLM has, and make rows of them."""

# pyright: reportAttributeAccessIssue=false
# verl's llm_server_manager has the type of a coroutine.
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from agentlightning.verl.agl_rollout_manager import CompletedRollout
from agentlightning.verl.rollout_adapter import RolloutAdapter
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from omegaconf import OmegaConf
from torch.utils.data import Dataset
from verl import DataProto

from empo2.recipe.config import Settings
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.trainer.manager import TASK, Empo2RolloutManager, vocabulary_of
from empo2.recipe.trainer.replay import Replay
from empo2.recipe.trainer.shown_rollouts import RunRecords
from empo2.recipe.trainer.step_results import staleness
from empo2.recipe.trainer.tracking import training_metrics

_ATTEMPTS = 3


class TaskDataset(Dataset[dict[str, Any]]):
    """Tasks as they are given; a task without ``index`` gets agent-lightning's, 0 or that of ``extra_info``.

    agent-lightning's ``LoadedDataset`` makes a table of them: a field that the first task lacks is lost, whole numbers
    beside fractions become fractions, a list of different types is refused, and a field ``index`` becomes 0.
    """

    def __init__(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        self._tasks = [dict(tasks[place]) for place in range(len(tasks))]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, place: int) -> dict[str, Any]:
        task = self._tasks[place]
        extra = task.get("extra_info")
        index = extra.get("index", 0) if isinstance(extra, Mapping) else 0
        own = task | {"index": task.get("index", index)}
        return {TASK: own, "fake_ids": torch.ones(1)}  # verl's batches have a tensor


class PlayingTrainer(AgentLightningRayPPOTrainer):
    """agent-lightning's trainer with EMPO²'s rollouts.

    Attributes:
        manager: of the rollouts that are played or were played last; its ``results`` say what became of them.
        records: what the run's folder keeps.
        replay: stored successes.
    """

    manager: Empo2RolloutManager

    def __init__(self, *args: Any, settings: Settings, gateway: GatewayClient, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings
        self.gateway = gateway
        self.replay = Replay(settings.algorithm)
        self.records = RunRecords(OmegaConf.select(self.config, "empo2.run_directory"), settings.run, self.tokenizer)
        # The steps are counted. Tasks are drawn ahead, or drawn again, so that epochs may be over before the steps are.
        self.config.trainer.total_epochs = sys.maxsize

    def play(self, tasks: DataProto, *, is_train: bool) -> list[CompletedRollout]:
        """Play tasks; return the rollouts that can be used.

        Raises:
            NoUsableRollouts: there are none.
        """
        make: Any = partial(
            Empo2RolloutManager,
            settings=self.settings,
            gateway=self.gateway,
            max_prompt_tokens=self.config.agentlightning.trace_aggregator.trajectory_max_prompt_length,
            vocabulary=vocabulary_of(self.config.actor_rollout_ref.model.path),
            version=self.global_steps - is_train,  # a validation comes after its step's update
            pauses=self.is_async,
            controller_log=self.records.controller_log,
        )
        self.manager = manager = self._make_rollout_manager(make)
        self._resume_all_rollout_generation()  # pyright: ignore[reportUnusedCoroutine]
        manager.delete_model()
        manager.register_model(list(self.llm_server_manager.get_addresses()))
        groups = self.config.data.train_batch_size if is_train and self.is_async else None
        carried = self._carry_over_rollouts if is_train else []
        try:
            return manager.play(tasks.non_tensor_batch[TASK], is_train=is_train, groups=groups, carried_over=carried)
        finally:
            if is_train:
                self._carry_over_rollouts = manager.carried_over
            if not self.is_async:  # agents that were ended have left calls
                self._abort_all_rollout_requests()  # pyright: ignore[reportUnusedCoroutine]

    def play_until_usable(self, *, profile: bool) -> tuple[list[CompletedRollout], dict[str, Any]]:
        """Play batches of training tasks until there is something to train on; return it, and metrics of all.

        Args:
            profile: whether vLLM profiles them.

        Raises:
            NoUsableRollouts: three batches have left nothing to train on.
        """
        attempt, lost = 1, 0
        while True:
            carried = list(self._carry_over_rollouts)
            tasks = DataProto.from_single_dict(self._next_train_batch_dict_for_rollout())
            if profile:
                self.llm_server_manager.start_profile()
            try:
                rollouts = self.play(tasks, is_train=True)
                break
            except NoUsableRollouts as error:
                self.records.note_rollouts(self.manager, self.global_steps, "training", {})
                self.records.write_rollouts()
                print(f"step {self.global_steps}, attempt {attempt} of {_ATTEMPTS}: {error}", flush=True)
                if attempt == _ATTEMPTS:
                    raise
                attempt += 1
                lost += len(self.manager.results.dropped)
            finally:
                if profile:
                    self.llm_server_manager.stop_profile()
        manager, results = self.manager, self.manager.results
        metrics = training_metrics(results, self.settings.algorithm.success_return) | manager.metrics
        metrics |= self._rollout_lifecycle_metrics(rollouts) | {"empo2/step_attempts": attempt}
        metrics["empo2/rollouts_dropped"] += lost
        if self.is_async:
            metrics |= staleness(results.kept, self.global_steps - 1)
            metrics |= self._compute_async_rollout_metrics(
                previous_carry_over_rollouts=carried,
                completed_rollouts=rollouts,
                new_carry_over_rollouts=self._carry_over_rollouts,
            )
        return rollouts, metrics

    def rows_of(self, rollouts: list[CompletedRollout]) -> tuple[DataProto, dict[str, Any]]:
        """Return agent-lightning's rows of rollouts, and its metrics of them."""
        batch, metrics = self.adapter().get_train_data_batch(rollouts, global_steps=self.global_steps)
        batch.non_tensor_batch["uid"] = batch.non_tensor_batch["data_id_list"]
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        return batch, metrics

    def adapter(self) -> RolloutAdapter:
        limits = self.config.agentlightning.trace_aggregator
        return RolloutAdapter(
            max_prompt_length=limits.trajectory_max_prompt_length,
            max_response_length=limits.trajectory_max_response_length,
            device=torch.device("cpu"),
            pad_token_id=self.tokenizer.pad_token_id or 0,
            trace_aggregator_level="trajectory",
            tokenizer=self.tokenizer,
        )
