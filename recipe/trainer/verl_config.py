"""Translate settings to the configuration of verl and agent-lightning: every translated key in one place."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict

from empo2.memory.cpu import CACHE_BLOCK, EXECUTOR, fast_dtype
from empo2.recipe.config import VLLM_TRACES, Settings, flat, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.network import LOOPBACK
from empo2.recipe.protocol import KEY_CHECK, PROMPT_IDS, scope_of
from empo2.recipe.redaction import redacted
from empo2.recipe.scopes import recurrence_warning

# Settings of the objective by the keys below verl's actor, which computes it.
_OBJECTIVE = {
    "learning_rate": "optim.lr",
    "clip_low": "clip_ratio_low",
    "clip_high": "clip_ratio_high",
    "kl_coefficient": "kl_loss_coef",
    "update_epochs": "ppo_epochs",
}


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
        ConfigError: verl or a logger is not installed, a key under ``verl`` is not one of verl's or agent-lightning's,
            or as `check_options`.
    """
    # agent-lightning's own search path is pkg://verl, and would import verl before Ray has been started.
    verl = importlib.util.find_spec("verl")
    if verl is None or not verl.submodule_search_locations:
        fix = "install beside agent-lightning's setup_verl.sh 0.8.0 cu130, or use `make setup profile=gpu` in a clone"
        raise ConfigError(f"verl is not installed, which training needs: {fix}")
    search_path = f"hydra.searchpath=[file://{verl.submodule_search_locations[0]}/trainer/config]"
    with initialize_config_module(config_module="agentlightning.verl", version_base=None):
        config = compose(config_name="config", overrides=[search_path])
    values = _translated(settings, model_path, run_directory) | {
        "agentlightning.agl_base_url": gateway_url,
        "agentlightning.agl_key": gateway_key,
    }
    if settings.hardware.device == "cpu":
        values |= _cpu_options(settings)
    if tool_parser is not None:
        vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm"
        values |= {f"{vllm}.enable_auto_tool_choice": True, f"{vllm}.tool_call_parser": tool_parser}
    if resume_from is not None:
        values |= {
            "trainer.resume_mode": "resume_path",
            "trainer.resume_from_path": str(resume_from),
            "trainer.val_before_train": False,
        }
    for key, value in values.items():
        OmegaConf.update(config, key, value, force_add=True)
    config.agentlightning.local.env_map = literally(settings.agent.env)
    # vLLM's own options, which verl does not list.
    OmegaConf.set_struct(config.actor_rollout_ref.rollout.engine_kwargs, False)
    for key, value in flat(settings.verl):
        if key.startswith("algorithm.rollout_correction"):
            why = "corrects the ratio of old log-probs and vLLM's, but vLLM's are the old ones here; take it out"
            raise ConfigError(f"verl.{key}={value!r}: {why}")
        try:
            OmegaConf.update(config, key, value, merge=True)
        except Exception as error:
            reason = str(error).splitlines()[0]
            shown = redacted({key.rpartition(".")[2]: value}).popitem()[1]
            raise ConfigError(f"verl.{key}={shown!r}: not an option of verl or agent-lightning: {reason}") from None
    for name in settings.run.loggers:
        if name != "console" and importlib.util.find_spec(name) is None:
            raise ConfigError(f"run.loggers={settings.run.loggers}: the package {name} is not installed; add it by pip")
    ours: Any = settings.to_dict() | {"run_directory": str(run_directory)}
    ours["algorithm"] |= _objective(config)  # `verl` may have overridden it
    with open_dict(config):
        config.empo2 = literally(ours)
    check_options(settings, config, "fsdp2")
    return config


def check_options(settings: Settings, config: DictConfig, *strategies: str) -> None:
    """Refuse options of verl and agent-lightning that EMPO² cannot be right with.

    Args:
        strategies: of verl's that are allowed; our engine is registered for fsdp2 alone. Rows must not be split over
            GPUs, since ``updates.lay_out`` deals whole rows to as many ranks as there are GPUs.

    Raises:
        ConfigError: names the option, its value and why.
    """

    def refuse(key: str, why: str) -> NoReturn:
        raise ConfigError(f"{key}={OmegaConf.select(config, key)!r}: {why}")

    algorithm = settings.algorithm
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    # vLLM would get the LoRA as an adapter, but agents name the model.
    if OmegaConf.select(config, f"{model}.lora_rank") > 0 and not OmegaConf.select(config, f"{model}.lora.merge"):
        refuse(f"{model}.lora_rank", f"vLLM answers agents without it unless it is merged; set {model}.lora.merge=True")
    for part in (actor, "actor_rollout_ref.ref"):
        if OmegaConf.select(config, f"{part}.strategy") not in strategies:
            refuse(f"{part}.strategy", f"must be {' or '.join(strategies)}")
        for key in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
            if (OmegaConf.select(config, f"{part}.{key}") or 1) > 1:
                fix = "set it to 1; for longer rows use model.lora_rank, hardware.offload or more memory"
                refuse(f"{part}.{key}", f"rows would get into wrong updates; {fix}")
    attention = OmegaConf.select(config, f"{model}.override_config.attn_implementation")
    for name in ("actor.use_dynamic_bsz", "ref.log_prob_use_dynamic_bsz", "rollout.log_prob_use_dynamic_bsz"):
        key = f"actor_rollout_ref.{name}"
        if OmegaConf.select(config, key) and attention == "sdpa":
            refuse(key, "sdpa gets a dense mask, and no flash kernel; set it to False, and give hardware.micro_batch")
    needed = (
        (f"{actor}.shuffle", False, "mini-batches are those that updates.py plans"),
        (f"{rollout}.logprobs_mode", "processed_logprobs", "old and teacher's log-probs must be at model.temperature"),
        ("agentlightning.max_ppo_update_times", None, "it drops rows; set algorithm.updates_per_step"),
        ("agentlightning.trace_aggregator.level", "trajectory", "EMPO² makes the rows"),
        ("agentlightning.trace_aggregator.trajectory_max_total_length", None, "set trajectory_max_response_length"),
        ("algorithm.adv_estimator", "grpo", "EMPO² makes the advantages: algorithm.baseline"),
        ("algorithm.enable_rollout_level_advantage", True, "EMPO² makes the advantages: algorithm.baseline"),
        ("algorithm.norm_adv_by_std_in_grpo", algorithm.normalize_by_std, "as algorithm.normalize_by_std"),
        (f"{actor}.ppo_epochs", algorithm.update_epochs, "as algorithm.update_epochs"),
        (f"{actor}.policy_loss.loss_mode", "per_rollout_mean", "EMPO² has its own loss"),
        ("algorithm.use_kl_in_reward", False, "the KL is a term of the loss: algorithm.kl_coefficient"),
        ("critic.enable", False, "EMPO² has no critic"),
        ("trainer.critic_warmup", 0, "EMPO² has no critic"),
    )
    for key, value, why in needed:
        if (OmegaConf.select(config, key) or None) != (value or None):
            refuse(key, f"must be {value!r}: {why}")
    gives_log_probs = {f"{actor}.strategy": "fsdp2", f"{model}.use_fused_kernels": False}
    for key, value in (gives_log_probs | {f"{actor}.calculate_sum_pi_squared": False}).items():
        if algorithm.distills and (OmegaConf.select(config, key) or False) != value:
            loss = f"algorithm.off_policy_loss={algorithm.off_policy_loss!r}"
            refuse(key, f"does not give the log-probs that {loss} needs; set it to {value}")
    chosen, trained = config.agentlightning.async_rollout, config.data.train_batch_size
    if chosen.enabled and (chosen.async_train_batch_size is None or chosen.async_train_batch_size <= trained):
        why = f"must exceed the groups that a step trains, data.train_batch_size={trained} (algorithm.tasks_per_step)"
        refuse("agentlightning.async_rollout.async_train_batch_size", why)
    if chosen.enabled and algorithm.name == "empo2" and algorithm.mode_per == "step":
        why = "groups of different steps are trained together with agentlightning.async_rollout.enabled"
        raise ConfigError(f"algorithm.mode_per='step': {why}; set it to group")


def read_settings(config: DictConfig) -> Settings:
    """Return the settings of an agent-lightning configuration, from its section ``empo2`` and from the other sections.

    A user's own configuration for agent-lightning gives the sizes of a step by verl's keys.

    Raises:
        ConfigError: a setting is unknown, ill-typed or impossible, or stands under a key that nothing reads; or
            as `check_options`.
    """
    for key in map(str, config):
        if key.startswith("+"):
            raise ConfigError(f"{key}: the + belongs to Hydra's command line; write {key.lstrip('+')}.KEY=VALUE")
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
            "ray_address": None if (joined := config.ray_kwargs.ray_init.get("address")) == "local" else joined,
            "nodes": config.trainer.nnodes,
            "gpus_per_node": config.trainer.n_gpus_per_node,
            "tensor_parallel": rollout.tensor_model_parallel_size,
        },
    }
    for section, values in said.items():
        layer[section] = values | layer.get(section, {})
    _check_objective(config, layer)
    layer["algorithm"] = _objective(config) | layer["algorithm"]
    settings = load_settings(layer=layer)
    check_options(settings, config, "fsdp2", "fsdp")  # a script that does not choose has fsdp, with verl's own engine
    return settings


def _objective(config: DictConfig) -> dict[str, float]:
    """Return by setting what verl computes the objective with, by its own keys."""
    actor = config.actor_rollout_ref.actor
    values = {name: OmegaConf.select(actor, key) for name, key in _OBJECTIVE.items()}
    return values if actor.use_kl_loss else values | {"kl_coefficient": 0.0}


def _check_objective(config: DictConfig, layer: Mapping[str, Any]) -> None:
    """Refuse a setting that a script gives itself, or by its form, where verl's key says otherwise.

    Raises:
        ConfigError: names both.
    """
    asked, plain, given = load_settings(layer=layer).algorithm, load_settings().algorithm, layer.get("algorithm", {})
    for name, value in _objective(config).items():
        if (wanted := getattr(asked, name)) != value and (name in given or wanted != getattr(plain, name)):
            also = " and use_kl_loss=True" if name == "kl_coefficient" else ""
            fix = f"give it actor_rollout_ref.actor.{_OBJECTIVE[name]}={wanted:g}{also}"
            raise ConfigError(f"algorithm.{name}={wanted:g}: the script has {value:g}, which verl reads; {fix}")


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


def name_middleware(config: DictConfig, settings: Settings) -> None:
    """Let vLLM's servers check the key, and take prompt ids if they get any.

    Raises:
        ConfigError: another middleware is named; verl passes one on.
    """
    name, ours = "actor_rollout_ref.rollout.engine_kwargs.vllm.middleware", (KEY_CHECK, PROMPT_IDS)
    if (other := OmegaConf.select(config, name)) not in (None, *ours):
        raise ConfigError(f"{name}={other!r}: the place is taken by the check of the servers' key; take it out")
    OmegaConf.update(config, name, ours[settings.gateway.cumulative_tokens], force_add=True)


def take_traces(config: DictConfig, endpoint: str) -> None:
    """Let vLLM send spans to the collector, children of the gateway's, and say which tokens of a prompt were cached."""
    vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    for name, value in {"otlp_traces_endpoint": endpoint, "enable_prompt_tokens_details": True}.items():
        OmegaConf.update(config, f"{vllm}.{name}", value, force_add=True)
    # Without statistics, as verl starts it, vLLM 0.20 fails every request that it has a span for.
    config.actor_rollout_ref.rollout.disable_log_stats = False
    for name, value in VLLM_TRACES.items():
        OmegaConf.update(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{name}", value, force_add=True)


def check_tip_tokens(config: DictConfig, episode_tokens: int | None) -> None:
    """Warn if the gateway's tips may leave no room for the agent's own first prompt."""
    limit = config.agentlightning.trace_aggregator.trajectory_max_prompt_length
    if episode_tokens is not None and episode_tokens > limit // 2:
        tips = f"the gateway's memory.episode_tokens={episode_tokens}"
        prompt = f"agentlightning.trace_aggregator.trajectory_max_prompt_length={limit}"
        fix = f"raise it, or start empo2 gateway with memory.episode_tokens={max(limit // 4, 1)}"
        print(f"WARNING: {tips} may fill half of {prompt}, beyond which nothing is trained; {fix}", flush=True)


def _translated(settings: Settings, model_path: str, run_directory: Path) -> dict[str, Any]:
    """Return what the settings mean by verl's keys, where that is not verl's default."""
    run, algorithm, model, hardware = settings.run, settings.algorithm, settings.model, settings.hardware
    aggregator, policy = "agentlightning.trace_aggregator", "actor_rollout_ref.model"
    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    offload = hardware.offload and hardware.device == "gpu"
    values = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": algorithm.normalize_by_std,
        "algorithm.rollout_correction": None,  # vLLM's log-probs *are* the old log-probs: there is nothing to correct
        "agentlightning.rollout_timeout_seconds": settings.agent.time_limit,
        "agentlightning.local.agent_class": settings.agent.class_,
        f"{aggregator}.trajectory_max_prompt_length": model.max_prompt_tokens,
        f"{aggregator}.trajectory_max_response_length": model.max_episode_tokens,
        "data.train_batch_size": algorithm.tasks_per_step,
        "data.max_prompt_length": model.max_prompt_tokens,
        "data.max_response_length": model.max_episode_tokens,
        "data.dataloader_num_workers": 0,
        "data.seed": algorithm.seed,
        f"{policy}.path": model_path,
        f"{policy}.use_remove_padding": False,  # needs flash-attn, which takes half an hour to build
        f"{policy}.enable_gradient_checkpointing": hardware.device == "gpu",
        f"{policy}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        # Only for verl's own checks; updates.py plans the mini-batches.
        f"{actor}.ppo_mini_batch_size": max(1, algorithm.tasks_per_step // algorithm.updates_per_step),
        f"{actor}.ppo_micro_batch_size_per_gpu": hardware.micro_batch,
        f"{actor}.use_torch_compile": False,
        f"{actor}.optim.override_optimizer_config.fused": True,  # else FSDP's shards are updated one by one
        **{f"{actor}.{key}": getattr(algorithm, name) for name, key in _OBJECTIVE.items()},
        f"{actor}.clip_ratio_c": 10.0,  # of the dual clip, for negative advantages [paper]
        f"{actor}.use_kl_loss": algorithm.kl_coefficient > 0,
        f"{actor}.fsdp_config.param_offload": offload,
        f"{actor}.fsdp_config.optimizer_offload": offload,
        # The next layer's weights are gathered while this one computes, for one more layer in memory.
        f"{actor}.fsdp_config.forward_prefetch": hardware.gpus > 1,
        f"{ref}.log_prob_micro_batch_size_per_gpu": hardware.micro_batch,
        f"{ref}.fsdp_config.param_offload": offload,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": algorithm.rollouts_per_task,
        f"{rollout}.temperature": model.temperature,
        f"{rollout}.max_model_len": model.max_context_tokens,
        # verl's own values, which pay here too: CUDA graphs (enforce_eager=False), since decoding waits for launches;
        # chunked prefill, so that a long prompt holds up no other agent; prefix caching, since each call extends the
        # last one; sleep of level 2, since level 1 keeps a copy of the weights, which are pushed anyway; pushes through
        # a bucket of 2 GiB, in which the largest matrix fits: the embedding of 7B has 1.1 GB in bfloat16.
        f"{rollout}.max_num_batched_tokens": max(8192, model.max_context_tokens),  # a prompt is read in one pass
        f"{rollout}.max_num_seqs": hardware.max_sequences,  # twice a step's agents, since some ask for reflections
        f"{rollout}.tensor_model_parallel_size": hardware.tensor_parallel,
        f"{rollout}.gpu_memory_utilization": hardware.gpu_memory_fraction,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": hardware.micro_batch,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.val_kwargs.n": run.validate_samples,
        f"{rollout}.val_kwargs.temperature": model.val_temperature,
        f"{rollout}.val_kwargs.do_sample": model.val_temperature > 0,
        # agent-lightning runs the rollouts itself; verl's own workers would only import and idle.
        f"{rollout}.agent.num_workers": 0,
        "reward.num_workers": 0,
        "critic.enable": False,  # else verl warns that there is none
        "trainer.project_name": "empo2",
        "trainer.experiment_name": run_directory.name,
        "trainer.logger": run.loggers,
        "trainer.nnodes": hardware.nodes,
        "trainer.n_gpus_per_node": hardware.gpus_per_node,
        "trainer.total_training_steps": run.steps,
        "trainer.val_before_train": run.validate_first,
        "trainer.test_freq": run.validate_every or run.steps,
        "trainer.save_freq": run.save_every or -1,
        "trainer.max_actor_ckpt_to_keep": run.keep_checkpoints,
        "trainer.default_local_dir": str(run_directory / "checkpoints"),
        "trainer.resume_mode": "disable",
        # "local": not a Ray that runs on this machine for someone else, which Ray would join
        "ray_kwargs.ray_init.address": hardware.cluster or "local",
    }
    if hardware.cluster is None:  # vLLM's server listens on the address that Ray reports for the node
        ray = "ray_kwargs.ray_init"
        values |= {f"{ray}._node_ip_address": LOOPBACK, f"{ray}.include_dashboard": False}
        # verl asks for three of a node's cores a GPU, and would wait for ever where Ray counts fewer.
        values[f"{ray}.num_cpus"] = max(os.cpu_count() or 1, 3 * hardware.gpus_per_node)
    if model.lora_rank:
        values |= {
            f"{policy}.lora_rank": model.lora_rank,
            f"{policy}.lora_alpha": model.lora_alpha,
            f"{policy}.lora.merge": True,  # see check_options; compat/verl.py mends verl's merging
        }
    return values


def _cpu_options(settings: Settings) -> dict[str, Any]:
    """Return by verl's keys what differs without a GPU; compat/ explains it."""
    workers, dtype = settings.hardware.gpus_per_node, fast_dtype()
    ray = "ray_kwargs.ray_init"
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        f"{actor}.fsdp_config.mixed_precision.param_dtype": dtype,  # verl's default for the rest is float32
        "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": dtype,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.enable_sleep_mode": False,
        f"{rollout}.enforce_eager": True,
        f"{rollout}.dtype": dtype,
        f"{rollout}.max_num_batched_tokens": 1024,  # vLLM starts with a batch of this size to measure memory
        f"{rollout}.engine_kwargs.vllm.block_size": CACHE_BLOCK,
        f"{rollout}.engine_kwargs.vllm.worker_extension_cls": "empo2.recipe.engine.cpu_worker.CpuWorkerExtension",
        f"{rollout}.engine_kwargs.vllm.distributed_executor_backend": EXECUTOR,
        **({f"{ray}.num_cpus": 2 + workers, f"{ray}.num_gpus": workers} if settings.hardware.cluster is None else {}),
    }


class _Literal(str):
    """A string that OmegaConf (2.3) takes for no interpolation, as it looks for ``${`` in it.

    Escapes do not help: ``OmegaConf.resolve`` puts the unescaped string back, which is then interpolated after all.
    """

    def __contains__(self, part: str) -> bool:
        return part != "${" and super().__contains__(part)


def literally(section: dict[str, Any]) -> DictConfig:
    """Return a nested dict as a section whose strings are never interpolated, neither on access nor when resolved."""
    return DictConfig(_marked(section), flags={"allow_objects": True})


def _marked(value: Any) -> Any:
    match value:
        case str() if "${" in value:
            return _Literal(value)
        case dict():
            return {key: _marked(each) for key, each in value.items()}
        case list():
            return [_marked(each) for each in value]
    return value
