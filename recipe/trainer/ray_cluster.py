"""Ray, and the environment of its workers; started before verl is imported, since both take their time."""

import os
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf

from empo2.recipe.trainer import ray_environment

# What verl 0.8's ``PPO_RAY_RUNTIME_ENV`` sets, without importing verl for it.
_VERL_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}


def start_ray(config: DictConfig) -> None:
    """Start or join Ray as ``config.ray_kwargs.ray_init`` says; nothing to do if this process has done so."""
    if ray.is_initialized():
        return
    options: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    runtime_env = dict(options.pop("runtime_env", None) or {})
    # No worker_process_setup_hook, as agent-lightning has: idle workers would import verl for nothing. The loss is
    # registered by the module that the loss function lies in (objective.py).
    runtime_env["env_vars"] = {
        **{name: value for name, value in _VERL_VARIABLES.items() if name not in os.environ},
        **ray_environment.VARIABLES,
        **runtime_env.get("env_vars", {}),
    }
    ray.init(runtime_env=runtime_env, _temp_dir=os.environ.get("RAY_TMPDIR"), **options)
