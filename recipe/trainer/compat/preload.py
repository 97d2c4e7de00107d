"""What the fork server imports for its forks: vLLM and what verl imports beside it, 10 CPU seconds.

Not Ray, which reads a worker's variables (``RAY_JOB_ID``) while it is imported, and so not verl: both take a second.
"""

import gc
import importlib

from empo2.recipe.trainer.compat.imports import import_without_sklearn, use_vllm_of_the_cpu

import_without_sklearn()
use_vllm_of_the_cpu()
for name in (
    *("accelerate", "datasets", "hydra", "peft", "tensordict", "torchdata.stateful_dataloader"),
    *("torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"),
    *("vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
):
    importlib.import_module(name)
gc.freeze()  # so that forks do not write to the pages of these objects
