"""verl 0.8.0's ``verl.model_merger`` with weights as they were trained; ``FSDPModelMerger`` rounds them to bfloat16."""

import runpy

import torch

torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign]
runpy.run_module("verl.model_merger", run_name="__main__")
