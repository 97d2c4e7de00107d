"""Log-probs, entropies and gradients are verl's own, where tokens are trained; elsewhere no logits are computed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = """
import json, sys
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.utils.distributed import initialize_global_process_group_ray

initialize_global_process_group_ray()
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from empo2.recipe.trainer.compat.trained_logits import TrainedLogitsEngine

folder, micro_batch = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)

# Rows of different lengths, two turns each; the third has no trained token, as a filler.
prompts, responses = torch.randint(97, (4, 6)), torch.randint(97, (4, 8))
attention = torch.ones(4, 14, dtype=torch.long)
attention[1, :3] = attention[2, :5] = 0
attention[2, 7:] = attention[3, 11:] = 0
mask = torch.zeros(4, 8, dtype=torch.long)
mask[0, :3] = mask[0, 6:] = mask[1, :2] = mask[1, 5] = mask[3, 1:5] = 1


def batch():
    rows = {"input_ids": torch.cat([prompts, responses], 1), "attention_mask": attention, "response_mask": mask,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0), "prompts": prompts, "responses": responses}
    data = left_right_2_no_padding(DataProto.from_dict({k: v.clone() for k, v in rows.items()}).to_tensordict())
    tu.assign_non_tensor(data, temperature=0.7, calculate_entropy=True, use_remove_padding=False,
                         use_fused_kernels=False, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro_batch,
                         max_response_length=8)
    return data


seen = []


def loss(model_output, data, dp_group=None):
    tokens = data["response_mask"].bool()
    log_prob, entropy = (no_padding_2_padding(model_output[key], data) for key in ("log_probs", "entropy"))
    seen.append((log_prob.detach() * tokens, entropy.detach() * tokens))
    return ((log_prob * log_prob.sin() + 0.3 * entropy) * tokens).sum(), {}


def run(engine_class):
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = engine_class(
        HFModelConfig(path=folder, load_tokenizer=False, enable_gradient_checkpointing=False,
                      override_config={"attn_implementation": "sdpa"}),
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", mixed_precision=fp32, use_torch_compile=False),
        FSDPOptimizerConfig(lr=0.1, total_training_steps=1),
        CheckpointConfig(),
    )
    engine.initialize()
    logits = []
    engine.module.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.shape[1]))
    seen.clear()
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(), loss)
        gradients = [p.grad.full_tensor().flatten() for p in engine.module.parameters()]
    log_probs, entropies = (torch.cat(each) for each in zip(*seen))
    return torch.cat(gradients), log_probs, entropies, logits


theirs, ours = run(FSDPEngineWithLMHead), run(TrainedLogitsEngine)
print(json.dumps({
    "differences": [float((a - b).abs().max()) for a, b in zip(theirs[:3], ours[:3])],
    "sizes": [float(a.abs().max()) for a in theirs[:3]],
    "logits": [theirs[3], ours[3]],
}))
"""


def compare(folder: Path, micro_batch: int) -> Any:
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "DIST_INIT_METHOD": f"file://{folder / 'rendezvous'}",
        "VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl",
    }
    command = [sys.executable, "-c", RUN, str(folder / "model"), str(micro_batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("micro_batch", "kept"),
    # The union over a micro-batch: row 0 has 5 6 7 11 12 (one before its tokens), row 1 has 2 3 7, row 3 has 6 7 8 9.
    [(1, [5, 3, 1, 4]), (2, [7, 4])],
)
def test_numbers_are_verls_own(tmp_path: Path, micro_batch: int, kept: list[int]) -> None:
    result = compare(tmp_path, micro_batch)
    assert all(size > 1e-2 for size in result["sizes"])
    assert max(result["differences"]) < 1e-5
    theirs, ours = result["logits"]
    assert ours == kept
    assert sum(theirs) > sum(ours)
