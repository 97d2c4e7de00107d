"""Translate settings to the configuration of verl and agent-lightning: every translated key in one place."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict

from empo2.memory.cpu import fast_dtype
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.protocol import PROMPT_IDS, scope_of
from empo2.recipe.redaction import redacted
from empo2.recipe.scopes import recurrence_warning
from empo2.recipe.trainer.literal import literally


def build_verl_config(
    settings: Settings,
    *,
    model_path: str,
    run_directory: Path,
    gateway_url: str,
    gateway_key: str,
    tool_parser: str | None = None,
    resume_from: Path | None = None,
) -> DictConfig:
    """Return agent-lightning's configuration with this run's values, and EMPO²'s own settings under ``empo2``.

    Args:
        tool_parser: that vLLM reads the model's tool calls with; None for none.
        resume_from: a checkpoint of the run; its step is not validated again.

    Raises:
        ConfigError: a key under ``verl`` is not one of verl's or agent-lightning's, a logger is not installed, or as
            `check_lora` and `check_async`.
    """
    # agent-lightning's own search path is pkg://verl, and would import verl before Ray has been started.
    verl = importlib.util.find_spec("verl")
    assert verl is not None and verl.submodule_search_locations
    search_path = f"hydra.searchpath=[file://{verl.submodule_search_locations[0]}/trainer/config]"
    with initialize_config_module(config_module="agentlightning.verl", version_base=None):
        config = compose(config_name="config", overrides=[search_path])
    layers = [_common(settings, model_path, run_directory, gateway_url, gateway_key)]
    if settings.hardware.device == "cpu":
        layers.append(cpu_options(settings))
    if settings.model.lora_rank:
        layers.append({"actor_rollout_ref": {"model": _lora(settings)}})
    if tool_parser is not None:
        options = {"enable_auto_tool_choice": True, "tool_call_parser": tool_parser}
        layers.append({"actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": options}}}})
    if resume_from is not None:
        layers.append(
            {"trainer": {"resume_mode": "resume_path", "resume_from_path": str(resume_from), "val_before_train": False}}
        )
    for layer in layers:
        with open_dict(config):
            config = OmegaConf.merge(config, layer)
    assert isinstance(config, DictConfig)
    config.agentlightning.local.env_map = literally(settings.agent.env)
    OmegaConf.set_struct(config, True)
    # vLLM's own options, which verl does not list.
    OmegaConf.set_struct(config.actor_rollout_ref.rollout.engine_kwargs, False)
    for key, value in _flatten(settings.verl):
        try:
            OmegaConf.update(config, key, value, merge=True)
        except Exception as error:
            reason = str(error).splitlines()[0]
            shown = redacted({key.rpartition(".")[2]: value}).popitem()[1]
            raise ConfigError(f"verl.{key}={shown!r}: not an option of verl or agent-lightning: {reason}") from None
    check_lora(config)
    _check_loggers(settings)
    with open_dict(config):
        config.empo2 = literally(settings.to_dict() | {"run_directory": str(run_directory)})
    check_async(settings, config)
    return config


def check_lora(config: DictConfig) -> None:
    """Refuse a LoRA that vLLM gets as an adapter: agents name the model, and vLLM would sample without the adapter.

    Raises:
        ConfigError: verl's ``lora_rank`` is given without ``lora.merge``.
    """
    model = config.actor_rollout_ref.model
    if model.lora_rank > 0 and not model.lora.merge:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={model.lora_rank}: vLLM answers agents without the LoRA unless it is "
            "merged; set actor_rollout_ref.model.lora.merge=True"
        )


def _check_loggers(settings: Settings) -> None:
    for name in settings.run.loggers:
        if name != "console" and importlib.util.find_spec(name) is None:
            raise ConfigError(f"run.loggers={settings.run.loggers}: the package {name} is not installed; add it by pip")


def read_settings(config: DictConfig) -> Settings:
    """Return the settings of an agent-lightning configuration, from its section ``empo2`` and from the other sections.

    A user's own configuration for agent-lightning gives the sizes of a step by verl's keys.

    Raises:
        ConfigError: a setting is unknown, ill-typed or impossible, or stands under a key that nothing reads; or
            as `check_lora`.
    """
    for key in map(str, config):
        if key.startswith("+"):
            raise ConfigError(
                f"{key}: the + belongs to Hydra's command line; OmegaConf.from_dotlist takes it for a part of the "
                f"name, which nothing reads. Write {key.lstrip('+')}.KEY=VALUE"
            )
    check_lora(config)
    layer: Any = OmegaConf.to_container(config.get("empo2") or OmegaConf.create({}), resolve=True)
    layer.pop("run_directory", None)
    actor, rollout, tasks = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    said = {
        "algorithm": {
            "normalize_by_std": config.algorithm.norm_adv_by_std_in_grpo,
            "tasks_per_step": tasks.train_batch_size,
            "rollouts_per_task": rollout.n,
            "updates_per_step": max(1, tasks.train_batch_size // actor.ppo_mini_batch_size),
        },
        "hardware": {
            "nodes": config.trainer.nnodes,
            "gpus_per_node": config.trainer.n_gpus_per_node,
            "tensor_parallel": rollout.tensor_model_parallel_size,
        },
    }
    for section, values in said.items():
        layer[section] = values | layer.get(section, {})
    return load_settings(layer=layer)


def check_async(settings: Settings, config: DictConfig) -> None:
    """Refuse asynchronous rollouts with settings that they cannot be right with.

    Raises:
        ConfigError: names the setting and why.
    """
    chosen, algorithm = config.agentlightning.async_rollout, settings.algorithm
    if not chosen.enabled:
        return
    size, trained = chosen.async_train_batch_size, config.data.train_batch_size
    if size is None or size <= trained:
        raise ConfigError(
            f"agentlightning.async_rollout.async_train_batch_size={size}: is the number of groups that are played at "
            f"once, of which a step trains data.train_batch_size={trained} (algorithm.tasks_per_step); must exceed it"
        )
    if algorithm.name == "empo2" and algorithm.mode_per == "step":
        raise ConfigError(
            "algorithm.mode_per='step': with agentlightning.async_rollout.enabled groups that were issued in different "
            "steps are trained together, so a step has no mode of its own; set it to group"
        )
    if algorithm.name == "empo2" and algorithm.off_policy_old_log_probs == "tip-free":
        raise ConfigError(
            "algorithm.off_policy_old_log_probs='tip-free': with agentlightning.async_rollout.enabled the weights that "
            "sampled a rollout may be gone when it is trained, and cannot be asked; set it to with-tips"
        )


def check_tasks(
    settings: Settings, config: DictConfig, train_dataset: Sequence[Any], val_dataset: Sequence[Any]
) -> None:
    """Refuse tasks that cannot be played; warn if their scopes seldom recur.

    Raises:
        ConfigError: there are none, or one has no scope.
    """
    for name, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
        if len(dataset) == 0:
            raise ConfigError(f"{name} is empty: there is no task to play")
    if settings.algorithm.name == "grpo":
        return
    for task in val_dataset if settings.run.validate_with_memory else ():
        scope_of(task, settings.memory.scope)
    trainer = config.trainer
    steps = trainer.total_training_steps or trainer.total_epochs * (
        len(train_dataset) // settings.algorithm.tasks_per_step
    )
    scopes = [scope_of(task, settings.memory.scope) for task in train_dataset]
    if warning := recurrence_warning(scopes, settings, steps):
        print(f"WARNING: {warning}", flush=True)


def take_prompt_ids(config: DictConfig) -> None:
    """Let vLLM's chat completions take prompt ids; other middleware that is named stays, since verl passes on one."""
    name = "actor_rollout_ref.rollout.engine_kwargs.vllm.middleware"
    if not OmegaConf.select(config, name):
        OmegaConf.update(config, name, PROMPT_IDS, force_add=True)


def check_tip_tokens(config: DictConfig, episode_tokens: int | None) -> None:
    """Warn if the gateway's tips may leave no room for the agent's own first prompt."""
    limit = config.agentlightning.trace_aggregator.trajectory_max_prompt_length
    if episode_tokens is not None and episode_tokens > limit // 2:
        print(
            f"WARNING: the gateway shows up to memory.episode_tokens={episode_tokens} tokens of tips; with the agent's "
            f"own text a first prompt may exceed agentlightning.trace_aggregator.trajectory_max_prompt_length={limit}, "
            f"and is not trained. Raise it, or start empo2 gateway with memory.episode_tokens={max(limit // 4, 1)}",
            flush=True,
        )


def _flatten(section: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in section.items():
        here = f"{path}.{key}" if path else str(key)
        items += _flatten(value, here) if isinstance(value, dict) and value else [(here, value)]
    return items


def _common(settings: Settings, model_path: str, run_directory: Path, url: str, key: str) -> dict[str, Any]:
    run, algorithm, model, hardware = settings.run, settings.algorithm, settings.model, settings.hardware
    return {
        "algorithm": {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": algorithm.normalize_by_std,
            "enable_rollout_level_advantage": True,
            "rollout_correction": None,  # vLLM's log-probs *are* the old log-probs, so there is nothing to correct
        },
        "agentlightning": {
            "agl_base_url": url,
            "agl_key": key,
            "rollout_timeout_seconds": settings.agent.time_limit,
            "local": {"agent_class": settings.agent.class_},
            "trace_aggregator": {
                "level": "trajectory",
                "trajectory_max_prompt_length": model.max_prompt_tokens,
                "trajectory_max_response_length": model.max_episode_tokens,
            },
        },
        "data": {
            "train_batch_size": algorithm.tasks_per_step,
            "val_batch_size": None,  # all at once
            "max_prompt_length": model.max_prompt_tokens,
            "max_response_length": model.max_episode_tokens,
            "dataloader_num_workers": 0,
            "seed": algorithm.seed,
        },
        "actor_rollout_ref": {
            "model": {
                "path": model_path,
                "use_remove_padding": False,  # needs flash-attn, which takes half an hour to build
                "enable_gradient_checkpointing": hardware.device == "gpu",
                "override_config": {"attn_implementation": "sdpa"},
            },
            "actor": {
                "strategy": "fsdp2",
                # Only for verl's own checks; updates.py plans the mini-batches.
                "ppo_mini_batch_size": max(1, algorithm.tasks_per_step // algorithm.updates_per_step),
                "ppo_micro_batch_size_per_gpu": hardware.micro_batch,
                "ppo_epochs": 1,
                "shuffle": False,
                "use_torch_compile": False,
                "clip_ratio": algorithm.clip_high,
                "clip_ratio_low": algorithm.clip_low,
                "clip_ratio_high": algorithm.clip_high,
                "clip_ratio_c": 10.0,  # of the dual clip, for negative advantages [paper]
                "use_kl_loss": algorithm.kl_coefficient > 0,
                "kl_loss_coef": algorithm.kl_coefficient,
                "optim": {"lr": algorithm.learning_rate},
                "fsdp_config": {"param_offload": hardware.offload, "optimizer_offload": hardware.offload},
            },
            "ref": {
                "strategy": "fsdp2",
                "log_prob_micro_batch_size_per_gpu": hardware.micro_batch,
                "fsdp_config": {"param_offload": hardware.offload},
            },
            "rollout": {
                "name": "vllm",
                "mode": "async",
                "n": algorithm.rollouts_per_task,
                "temperature": model.temperature,
                "prompt_length": model.max_prompt_tokens,
                "response_length": model.max_episode_tokens,
                "max_model_len": model.max_context_tokens,
                "max_num_batched_tokens": max(8192, model.max_context_tokens),
                "max_num_seqs": hardware.max_sequences,
                "tensor_model_parallel_size": hardware.tensor_parallel,
                "gpu_memory_utilization": hardware.gpu_memory_fraction,
                "log_prob_micro_batch_size_per_gpu": hardware.micro_batch,
                "calculate_log_probs": True,
                "val_kwargs": {
                    "n": run.validate_samples,
                    "temperature": model.val_temperature,
                    "do_sample": model.val_temperature > 0,
                },
                # agent-lightning runs the rollouts itself; verl's own workers would only import and idle.
                "agent": {"num_workers": 0},
            },
        },
        "reward": {"num_workers": 0},
        "trainer": {
            "project_name": "empo2",
            "experiment_name": run_directory.name,
            "logger": run.loggers,
            "nnodes": hardware.nodes,
            "n_gpus_per_node": hardware.gpus_per_node,
            "total_training_steps": run.steps,
            "total_epochs": run.steps,
            "val_before_train": run.validate_first,
            "test_freq": run.validate_every or run.steps,
            "save_freq": run.save_every or -1,
            "max_actor_ckpt_to_keep": run.keep_checkpoints,
            "default_local_dir": str(run_directory / "checkpoints"),
            "resume_mode": "disable",
        },
        "ray_kwargs": {
            "ray_init": {
                "include_dashboard": False,
                # vLLM's server listens on the address that Ray reports for the node.
                **({"_node_ip_address": "127.0.0.1"} if hardware.nodes == 1 else {}),
            }
        },
    }


def _lora(settings: Settings) -> dict[str, Any]:
    return {
        "lora_rank": settings.model.lora_rank,
        "lora_alpha": settings.model.lora_alpha,
        "target_modules": "all-linear",
        "lora": {"merge": True},  # see check_lora; compat/lora.py mends verl's merging
    }


def cpu_options(settings: Settings) -> dict[str, Any]:
    """Return the options that differ without a GPU; compat/ explains them."""
    workers, dtype = settings.hardware.gpus_per_node, fast_dtype()
    precision = {"param_dtype": dtype}  # verl's default for the rest is float32
    return {
        "actor_rollout_ref": {
            "actor": {
                "fsdp_config": {
                    "model_dtype": "fp32",
                    "mixed_precision": precision,
                    "param_offload": False,
                    "optimizer_offload": False,
                },
                "optim": {"override_optimizer_config": {"fused": True}},
            },
            "ref": {"fsdp_config": {"mixed_precision": precision}},
            "rollout": {
                "free_cache_engine": False,
                "enable_sleep_mode": False,
                "enforce_eager": True,
                "dtype": dtype,
                "max_num_batched_tokens": 1024,  # vLLM starts with a batch of this size to measure memory
                "engine_kwargs": {
                    "vllm": {
                        "worker_extension_cls": "empo2.recipe.trainer.compat.vllm.CpuWorkerExtension",
                        "distributed_executor_backend": "uni",
                    },
                },
            },
        },
        "ray_kwargs": {"ray_init": {"num_cpus": 2 + workers, "num_gpus": workers}},
    }
