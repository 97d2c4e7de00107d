"""verl 0.8.0 with our engine, with a LoRA that is merged for vLLM, without a GPU, and without flash-attn.

Loaded into every process that imports verl through ``VERL_USE_EXTERNAL_MODULES=empo2.recipe.trainer.compat.verl``,
while ``verl/__init__.py`` runs and before any other verl module binds the names patched here. Each patch names
the upstream symbol that makes it necessary; ``tests/recipe/test_compat.py`` fails when upstream fixes one.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import verl.utils.device
from torch.distributed.tensor import DTensor

from empo2.memory.cpu import fast_dtype
from empo2.recipe.trainer import ray_environment
from empo2.recipe.trainer.compat.imports import check_versions, import_without_sklearn, use_vllm_of_the_cpu
from empo2.recipe.trainer.compat.rounding import rounded_at_random


def use_torch_padding_helpers() -> None:
    """Replace the padding helpers that ``verl.utils.attention_utils`` imports from flash-attn.

    They only index. verl has pure-torch versions of the same functions in ``npu_flash_attn_utils``; with them neither a
    CPU nor a GPU machine has to build flash-attn (sdpa attention, no padding removal). verl 0.9.1 falls back to helpers
    of its own without flash-attn: this goes.
    """
    import verl.utils.attention_utils as attention_utils
    from einops import rearrange
    from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, unpad_input

    attention_utils._get_attention_functions = lambda: (index_first_axis, pad_input, rearrange, unpad_input)


def listen_at_the_master_address() -> None:
    """Bind torch's store to the address that it is reached by (``rendezvous._create_c10d_store``), not to all."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    store = rendezvous.TCPStore

    def bound(**options: Any) -> Any:
        if options["is_master"]:
            host = options["host_name"]
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            options["master_listen_fd"] = socket.create_server((host, options["port"]), family=family).detach()
        return store(**options)

    rendezvous.TCPStore = bound  # pyright: ignore[reportAttributeAccessIssue]


def run_without_accelerator() -> None:
    """Make verl's FSDP2 engine and its vLLM rollout run on the CPU. Idempotent.

    With verl 0.9.1 the patches of verl become ``VERL_PLATFORM=cpu`` and a class of some 30 lines that
    ``PlatformRegistry`` registers as "cpu"; those of vLLM stay.
    """
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
    import verl.utils.fsdp_utils as fsdp_utils

    # FSDPEngine offloads the reference of the KL term to pinned memory, which asks for a driver.
    fsdp_utils.CPUOffloadPolicy = lambda **_: None  # pyright: ignore[reportPrivateImportUsage]

    initialize = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: initialize(
        timeout_second, backend or "cpu:gloo"
    )

    use_vllm_of_the_cpu()
    from vllm.platforms.cpu import CpuPlatform

    # verl's ServerAdapter asks for it but does not use it, and vLLM does not implement it.
    CpuPlatform.get_device_uuid = classmethod(lambda cls, device_id=0: "cpu")  # type: ignore[method-assign]


def push_unrounded_weights() -> None:
    """Push to vLLM the weights that are trained, where a CPU computes in float32.

    ``FSDPEngine.get_per_tensor_param`` (0.8 and 0.9.1) rounds sharded weights to bfloat16. On a GPU both sides compute
    with these; in float32 vLLM would sample from another policy: after two updates at 1e-4 its log-probs were 0.11 nats
    from the trainer's. It leaves whole tensors as they are, and names them by ``convert_weight_keys`` first.
    """
    import verl.utils.model as model

    rename = model.convert_weight_keys

    def renamed(params: dict[str, Any], module: Any) -> dict[str, Any]:
        whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in params.items()}
        return rename(whole, module)

    model.convert_weight_keys = renamed


def push_through_own_sockets() -> None:
    """Name the sockets of the weight push by the run, too.

    verl 0.8 names them by the Ray job (``ServerAdapter.__init__``, ``vLLMHttpServer.__init__``), and each Ray that a
    run starts calls its first job 01000000: of two runs on a host one hung, or vLLM got the other run's weights.
    """
    from ray.runtime_context import RuntimeContext

    job_of = RuntimeContext.get_job_id
    RuntimeContext.get_job_id = lambda self: f"{job_of(self)}-{os.environ.get(ray_environment.RUN, '')}"


def push_merged_lora(*, exact: bool) -> None:
    """Copy the merged weights that verl pushes to vLLM with ``model.lora.merge``.

    ``FSDPEngine.get_per_tensor_param`` merges the LoRA into the weights, takes references to them, and restores them in
    place (``merged_lora_context``) before it reads the references: vLLM would get the weights without the LoRA.
    verl 0.9.1 reads them inside the context (``_merged_lora_per_tensor_param``): this goes.

    Unless they stay exact they are rounded to bfloat16 at random, each time alike. verl rounds to the nearest, which
    keeps nothing of a change below half of a weight's last bit: of what a LoRA of rank 64 learns at 3e-6, vLLM would
    have 11 % after 16 updates and 49 % after 80 (simulated), while the trainer has all of it.
    """
    import verl.utils.fsdp_utils as fsdp_utils

    renamed = fsdp_utils.normalize_peft_param_name  # called once, on the merged weights

    def copy(weight: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        if exact or weight.dtype != torch.float32:
            return weight.to("cpu", copy=True)
        copied = weight.to("cpu", torch.bfloat16)
        own, shard = (each.to_local() if isinstance(each, DTensor) else each for each in (weight, copied))
        shard.copy_(rounded_at_random(own, noise))
        return copied

    def copied(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights = {name: weight.detach() for name, weight in renamed(params).items()}
        noise = torch.Generator(next(iter(weights.values())).device).manual_seed(0)
        return {name: copy(weight, noise) for name, weight in weights.items()}

    fsdp_utils.normalize_peft_param_name = copied


def keep_lora_trainable() -> None:
    """Let a model's first forward pass be one without its LoRA, as the reference of the KL term is.

    ``PeftModel.disable_adapter`` freezes the LoRA meanwhile, and FSDP2 (``FSDPParamGroup._init_mp_dtypes``) asks in the
    first pass, once for all, which parameters are trained; then their gradients would keep bfloat16 and be refused.
    verl computes old log-probs first, which the trainer here does not need. Stays with verl 0.9.1.
    """
    import verl.utils.fsdp_utils as fsdp_utils

    apply = fsdp_utils.apply_fsdp2

    @contextlib.contextmanager
    def without_lora(model: Any, disable: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        with disable():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.requires_grad_(True)
            yield

    def applied(model: Any, *args: Any, **kwargs: Any) -> None:
        apply(model, *args, **kwargs)
        if hasattr(model, "disable_adapter"):
            model.disable_adapter = partial(without_lora, model, model.disable_adapter)

    fsdp_utils.apply_fsdp2 = applied


def use_trained_logits() -> None:
    """Train with our engine. ``EngineRegistry.register`` would keep verl's own for CUDA.

    In verl 0.9.1 it refuses a key that is taken, and an engine registered with ``vendor="nvidia"`` comes before verl's:
    registering replaces this assignment.
    """
    from verl.workers.engine import EngineRegistry

    from .trained_logits import TrainedLogitsEngine

    EngineRegistry._engines["language_model"]["fsdp2"] |= dict.fromkeys(("cpu", "cuda"), TrainedLogitsEngine)


check_versions()
import_without_sklearn()
if importlib.util.find_spec("flash_attn") is None:
    use_torch_padding_helpers()
ray_environment.use_network()
listen_at_the_master_address()
exact = ray_environment.device() == "cpu" and fast_dtype() == "float32"
push_through_own_sockets()
push_merged_lora(exact=exact)
keep_lora_trainable()
if ray_environment.device() == "cpu":
    run_without_accelerator()
if exact:
    push_unrounded_weights()
use_trained_logits()
