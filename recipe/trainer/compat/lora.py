"""verl 0.8.0's LoRA with FSDP2, merged for vLLM; loaded before verl's engine binds the names patched here.

Each patch names the upstream symbol that makes it necessary; ``tests/recipe/test_compat.py`` fails when upstream fixes
one, and ``tests/recipe/test_engine.py`` shows what they make of it.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import verl.utils.fsdp_utils as fsdp_utils


def push_merged_lora() -> None:
    """Copy the merged weights that verl pushes to vLLM with ``model.lora.merge``.

    ``FSDPEngine.get_per_tensor_param`` merges the LoRA into the weights, takes references to them, and restores them in
    place (``merged_lora_context``) before it reads the references: vLLM would get the weights without the LoRA.
    verl 0.9.1 reads them inside the context (``_merged_lora_per_tensor_param``): this goes.
    """
    renamed = fsdp_utils.normalize_peft_param_name  # called once, on the merged weights

    def copied(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weight.detach().to("cpu", copy=True) for name, weight in renamed(params).items()}

    fsdp_utils.normalize_peft_param_name = copied


def keep_lora_trainable() -> None:
    """Let a model's first forward pass be one without its LoRA, as the reference of the KL term is.

    ``PeftModel.disable_adapter`` freezes the LoRA meanwhile, and FSDP2 (``FSDPParamGroup._init_mp_dtypes``) asks in the
    first pass, once for all, which parameters are trained; then their gradients would keep bfloat16 and be refused.
    verl computes old log-probs first, which the trainer here does not need. Stays with verl 0.9.1.
    """
    apply = fsdp_utils.apply_fsdp2

    def applied(model: Any, *args: Any, **kwargs: Any) -> None:
        apply(model, *args, **kwargs)
        if hasattr(model, "disable_adapter"):
            model.disable_adapter = partial(_without_lora, model, model.disable_adapter)

    fsdp_utils.apply_fsdp2 = applied


@contextlib.contextmanager
def _without_lora(model: Any, disable: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    with disable():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(True)
        yield
