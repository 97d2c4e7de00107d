"""verl 0.8.0 with our engine, without a GPU, and without flash-attn.

Loaded into every process that imports verl through ``VERL_USE_EXTERNAL_MODULES=empo2.recipe.trainer.compat.verl``,
while ``verl/__init__.py`` runs and before any other verl module binds the names patched here. Each patch names
the upstream symbol that makes it necessary; ``tests/recipe/test_compat.py`` fails when upstream fixes one.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import verl.utils.device

from empo2.recipe.trainer import ray_environment
from empo2.recipe.trainer.compat.imports import import_without_sklearn, use_vllm_of_the_cpu


def use_torch_padding_helpers() -> None:
    """Replace the padding helpers that ``verl.utils.attention_utils`` imports from flash-attn.

    They only index. verl has pure-torch versions of the same functions in ``npu_flash_attn_utils``; with them neither a
    CPU nor a GPU machine has to build flash-attn (sdpa attention, no padding removal).
    """
    import verl.utils.attention_utils as attention_utils
    from einops import rearrange
    from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, unpad_input

    attention_utils._get_attention_functions = lambda: (index_first_axis, pad_input, rearrange, unpad_input)


def run_without_accelerator() -> None:
    """Make verl's FSDP2 engine and its vLLM rollout run on the CPU. Idempotent."""
    # Ray is given a GPU that does not exist (ray_init.num_gpus); verl would ask it for an "NPU".
    verl.utils.device.get_resource_name = lambda: "GPU"
    # "cpu:gloo,cpu:nccl" names one device twice.
    verl.utils.device.get_nccl_backend = lambda: "gloo"

    # verl calls torch.cuda's names on torch.cpu (device.get_torch_device).
    missing: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all"), lambda *_, **__: None),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_, **__: 0),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda *_, **__: 0),
        "mem_get_info": lambda *_: (0, 0),
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    for name, function in missing.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)

    import verl.utils.distributed as distributed

    initialize = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: initialize(
        timeout_second, backend or "cpu:gloo"
    )

    use_vllm_of_the_cpu()
    from vllm.platforms.cpu import CpuPlatform

    # verl's ServerAdapter asks for it but does not use it, and vLLM does not implement it.
    CpuPlatform.get_device_uuid = classmethod(lambda cls, device_id=0: "cpu")  # type: ignore[method-assign]

    # vLLM turns the "uni" executor into "mp", one more process that imports vLLM for 20 s and holds a gigabyte.
    check_and_update_config = CpuPlatform.check_and_update_config

    def keep_executor(vllm_config) -> None:
        parallel = vllm_config.parallel_config
        backend = parallel.distributed_executor_backend
        check_and_update_config(vllm_config)
        parallel.distributed_executor_backend = backend

    CpuPlatform.check_and_update_config = staticmethod(keep_executor)  # type: ignore[method-assign]


def use_trained_logits() -> None:
    """Train with our engine. ``EngineRegistry.register`` would keep verl's own for CUDA."""
    from verl.workers.engine import EngineRegistry

    from .trained_logits import TrainedLogitsEngine

    EngineRegistry._engines["language_model"]["fsdp2"] |= dict.fromkeys(("cpu", "cuda"), TrainedLogitsEngine)


import_without_sklearn()
from empo2.recipe.trainer.compat import lora  # noqa: E402  imports these models

if importlib.util.find_spec("flash_attn") is None:
    use_torch_padding_helpers()
lora.push_merged_lora()
lora.keep_lora_trainable()
if ray_environment.device() == "cpu":
    run_without_accelerator()
use_trained_logits()
