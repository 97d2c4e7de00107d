"""verl 0.8.0's FSDP engine with logits at the trained positions only.

``FSDPEngineWithLMHead`` computes the LM head and the log-softmax for every token of a row: 15 GB for 12,692 tokens of
Qwen2.5, and without flash-attn token by token. Log-probs are used only where the policy has sampled a token, a tenth of
an episode. Elsewhere log-probs and entropies are 0 here, and the loss masks them out. verl's fused kernels would need
less memory too, but compute the LM head at all positions, twice, and need padding removal. With a teacher's likeliest
tokens in the batch, their log-probs are returned too; verl's own top-k distillation needs all logits.
"""

# pyright: reportAttributeAccessIssue=false
# verl's registration decorators have no types.
import gc
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_torch_device
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from empo2.recipe.trainer.log_probs import log_probs_of, trained_places

_NEEDS_ALL = ("use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk")


class TrainedLogitsEngine(FSDPEngineWithLMHead):
    """verl's engine; log-probs are computed in float32, as autocast on a GPU does, where the CPU's has bfloat16."""

    def initialize(self) -> None:
        super().initialize()
        # verl collects garbage some eight times in a step, among a million objects of imported modules: a third of the
        # worker's time. Nothing of them is garbage.
        gc.freeze()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device, model, optimizer, grad)
        # verl does so only behind the weight push, with which vLLM takes its memory back.
        get_torch_device().empty_cache()

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if not any(tu.get_non_tensor_data(data=micro_batch, key=option, default=False) for option in _NEEDS_ALL):
            packed = "temperature_rmpad" in arguments  # the rows lie one behind the other, without padding
            rows, columns = arguments["kept"] = kept_positions(micro_batch, packed=packed)
            nested: Any = micro_batch["input_ids"]
            inputs["logits_to_keep"] = (columns + nested.offsets()[rows] if packed else columns)[0]
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        if "kept" not in output_args:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        nested: Any = micro_batch["input_ids"]
        (rows, columns), offsets = output_args["kept"], nested.offsets()
        within = columns < offsets.diff()[rows]
        places = (offsets[rows] + columns).clamp(max=int(offsets[-1]) - 1)
        packed = output_args.get("temperature_rmpad")
        temperature = output_args["temperature"][rows] if packed is None else packed[places]
        # The token after the last one of a row is the next row's, and is never trained.
        labels = nested.values().roll(-1)[places]

        def spread(kept: torch.Tensor) -> torch.Tensor:
            values = kept.new_zeros(int(offsets[-1]), *kept.shape[2:]).index_put((places[within],), kept[within])
            return torch.nested.nested_tensor_from_jagged(values, offsets)

        names, others = ["log_probs"], None
        if entropy := bool(tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)):
            names.append("entropy")
        # Not in passes without a loss, such as the reference's.
        if logits_processor_func is not None and (teacher := micro_batch.get("teacher_tokens")) is not None:
            names.append("student_log_probs")
            tokens = (columns - _prompt_lengths(micro_batch)[rows] + 1).clamp(0, micro_batch["loss_mask"].shape[1] - 1)
            others = teacher[rows, trained_places(micro_batch["loss_mask"], teacher)[rows, tokens]].long()
        temperature = temperature.clamp(min=1e-8).unsqueeze(-1)
        numbers = log_probs_of(output.logits, labels, temperature, entropy=entropy, others=others)
        return {name: spread(values) for name, values in zip(names, numbers, strict=True)}


def kept_positions(micro_batch: TensorDict, *, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the position in it of each logit that is kept, both [rows, positions]; at least one.

    They are those that give the log-prob of a trained token. Padded rows all keep the union of their positions, sorted;
    packed rows, which lie one behind the other, are one row of their own positions.

    Args:
        micro_batch: with ``attention_mask`` [rows, prompt + response], ``prompts`` and ``loss_mask`` [rows, response].
    """
    rows, tokens = micro_batch["loss_mask"].nonzero(as_tuple=True)
    if not len(rows):
        rows, tokens = rows.new_zeros(1), tokens.new_zeros(1)
    columns = _prompt_lengths(micro_batch)[rows] + tokens - 1
    if packed:
        return rows.unsqueeze(0), columns.unsqueeze(0)
    every = torch.arange(len(micro_batch), device=rows.device)
    rows, columns = torch.meshgrid(every, torch.unique(columns), indexing="ij")
    return rows, columns


def _prompt_lengths(micro_batch: TensorDict) -> torch.Tensor:
    return micro_batch["attention_mask"][:, : micro_batch["prompts"].shape[1]].sum(1)
