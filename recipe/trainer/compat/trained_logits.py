"""verl 0.8.0's FSDP engine with logits at the trained positions only.

``FSDPEngineWithLMHead`` computes the LM head and the log-softmax for every token of a row: 15 GB for 12,692 tokens of
Qwen2.5, and without flash-attn token by token. Log-probs are used only where the policy has sampled a token, a tenth of
an episode. Elsewhere log-probs and entropies are 0 here, and the loss masks them out. verl's fused kernels would need
less memory too, but compute the LM head at all positions, twice, and need padding removal.
"""

# pyright: reportAttributeAccessIssue=false
# verl's registration decorators have no types.
import gc
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from empo2.recipe.trainer.log_probs import log_probs_of

_NEEDS_ALL = ("use_remove_padding", "use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk")


class TrainedLogitsEngine(FSDPEngineWithLMHead):
    """verl's engine; log-probs are computed in float32, as autocast on a GPU does, where the CPU's has bfloat16."""

    def initialize(self) -> None:
        super().initialize()
        # verl collects garbage some eight times in a step, among a million objects of imported modules: a third of the
        # worker's time. Nothing of them is garbage.
        gc.freeze()

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if not any(tu.get_non_tensor_data(data=micro_batch, key=option, default=False) for option in _NEEDS_ALL):
            arguments["columns"] = trained_columns(micro_batch)
            arguments["input_ids"] = inputs["input_ids"]
            inputs["logits_to_keep"] = arguments["columns"]
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        if "columns" not in output_args:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        nested: Any = micro_batch["input_ids"]
        columns, offsets = output_args["columns"], nested.offsets()
        temperature = output_args["temperature"].clamp(min=1e-8).view(-1, 1, 1)
        # The token after the last one of a padded row is never trained.
        labels = output_args["input_ids"].roll(-1, dims=1)[:, columns]
        within = columns < offsets.diff().unsqueeze(1)
        places = (offsets[:-1].unsqueeze(1) + columns)[within]

        def spread(kept: torch.Tensor) -> torch.Tensor:
            values = kept.new_zeros(int(offsets[-1])).index_put((places,), kept[within])
            return torch.nested.nested_tensor_from_jagged(values, offsets)

        entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
        numbers = log_probs_of(output.logits, labels, temperature, entropy=bool(entropy))
        return {name: spread(values) for name, values in zip(("log_probs", "entropy"), numbers, strict=False)}


def trained_columns(micro_batch: TensorDict) -> torch.Tensor:
    """Return the positions, sorted, whose logits give the log-prob of a trained token in any row; at least one.

    Args:
        micro_batch: with ``attention_mask`` [rows, prompt + response], ``prompts`` and ``loss_mask`` [rows, response].
    """
    prompt_lengths = micro_batch["attention_mask"][:, : micro_batch["prompts"].shape[1]].sum(1)
    rows, tokens = micro_batch["loss_mask"].nonzero(as_tuple=True)
    columns = torch.unique(prompt_lengths[rows] + tokens - 1)
    return columns if len(columns) else columns.new_zeros(1)
