"""The entry point behind ``run_empo2``: runs the trainer's process from its configuration to its last step."""

import threading
from collections.abc import Sequence
from typing import Any

from empo2.recipe.trainer import ray_environment  # before verl is imported
from empo2.recipe.trainer.compat import verl as _compat  # noqa: F401  a script that composes its configuration has imported verl already

# isort: split
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import RayActorError

from empo2.recipe import preemption
from empo2.recipe.config import Settings
from empo2.recipe.engine.model_key import give_key
from empo2.recipe.errors import Preempted
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.marked_lines import say_loading
from empo2.recipe.protocol import model_key
from empo2.recipe.trainer.compat.agentlightning import (
    start_no_load_balancer,
    start_vllm_beside_the_policy,
    use_tracking,
)
from empo2.recipe.trainer.node_watch import NodeWatch
from empo2.recipe.trainer.play import TaskDataset
from empo2.recipe.trainer.tracking import RunTracking
from empo2.recipe.trainer.trainer import Empo2Trainer
from empo2.recipe.trainer.verl_config import literally

_NAMED_SECONDS = 30


def train(
    config: DictConfig,
    settings: Settings,
    gateway: GatewayClient,
    train_dataset: Sequence[Any],
    val_dataset: Sequence[Any],
) -> None:
    """Train in this process; Ray holds verl's and vLLM's workers. See ``empo2.recipe.run_empo2``."""
    with open_dict(config):
        run_directory = OmegaConf.select(config, "empo2.run_directory")
        config.empo2 = literally(settings.to_dict() | ({"run_directory": run_directory} if run_directory else {}))
    use_tracking(RunTracking)
    start_no_load_balancer()
    give_key(model_key(config.agentlightning.agl_key))
    trainer = _make_trainer(config, settings, gateway, TaskDataset(train_dataset), TaskDataset(val_dataset))
    say_loading("policy")
    trainer.init_workers()
    say_loading("")
    done = threading.Event()
    watching = NodeWatch().end_process_with_them(done) if settings.hardware.cluster is not None else None
    steps = trainer.total_training_steps
    try:
        trainer.fit()
    except RayActorError:
        if watching is not None:  # which host it was is known in seconds
            watching.join(_NAMED_SECONDS)
        raise
    finally:
        done.set()
    if trainer.total_training_steps < steps:
        raise Preempted(f"{preemption.came()} ended the training after step {trainer.total_training_steps}, saved")


def _make_trainer(
    config: DictConfig, settings: Settings, gateway: GatewayClient, train_set: Any, val_set: Any
) -> Empo2Trainer:
    """Make the trainer as agent-lightning's ``_AglTaskRunner.run`` does; upstream hard-codes its own class."""
    from verl.trainer.main_ppo import TaskRunner, create_rl_sampler
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.dataset.rl_dataset import collate_fn
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

    OmegaConf.resolve(config)
    runner = TaskRunner()
    actor_rollout_cls, ray_worker_group_cls = runner.add_actor_rollout_worker(config)
    if ray_environment.device() == "cpu":
        ray_worker_group_cls = start_vllm_beside_the_policy(ray_worker_group_cls, config)
    runner.add_critic_worker(config)
    runner.add_reward_model_resource_pool(config)
    runner.add_ref_policy_worker(config, actor_rollout_cls)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    path = config.actor_rollout_ref.model.path
    trust = config.data.get("trust_remote_code", False)
    return Empo2Trainer(
        settings=settings,
        gateway=gateway,
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
