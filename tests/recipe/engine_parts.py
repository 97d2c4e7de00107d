"""verl's engine in a process of its own, for the scripts of test_engine.py and test_ranks.py."""

import os
import sys
from pathlib import Path
from typing import Any

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def command(script: str, rendezvous: Path, *arguments: object, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Arguments of `subprocess` for one rank of a script, which begins with `make`."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # two threads wait for each other where the machine is busy
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "DIST_INIT_METHOD": f"file://{rendezvous}",
        "VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl",
    }
    options = {"env": environment, "cwd": Path(__file__).parents[1], "text": True}
    return {"args": [sys.executable, "-c", script, *map(str, arguments)], **options}


def save_llama(folder: str, **sizes: Any) -> Any:
    """Save a random Llama of two layers, and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2} | sizes
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().float()
    model.save_pretrained(folder)
    return model


def make(
    path: str,
    kind: Any = None,
    optimizer: dict[str, Any] | None = None,
    model: Any = None,
    gradient_checkpointing: bool = False,
    **options: Any,
) -> Any:
    """An engine, ours or of a kind, with a saved model."""
    from verl.trainer.config import CheckpointConfig
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    initialize_global_process_group_ray()
    attention = {"attn_implementation": "sdpa"}
    model = model or {"load_tokenizer": False}
    engine = (kind or EngineRegistry.get_engine_cls("language_model", "fsdp2"))(
        HFModelConfig(
            path=path, enable_gradient_checkpointing=gradient_checkpointing, override_config=attention, **model
        ),
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", use_torch_compile=False, **options),
        FSDPOptimizerConfig(**{"total_training_steps": 9} | (optimizer or {})),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine
