"""Where tokens are trained, log-probs, entropies, gradients and updates are verl's; elsewhere are no logits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = """
import gc, json, sys
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

from empo2.recipe.config import load_settings
from empo2.recipe.trainer.compat import trained_logits
from empo2.recipe.trainer.compat.trained_logits import TrainedLogitsEngine
from empo2.recipe.trainer.verl_config import cpu_options

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


def run(engine_class, **optimizer):
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = engine_class(
        HFModelConfig(path=folder, load_tokenizer=False, enable_gradient_checkpointing=False,
                      override_config={"attn_implementation": "sdpa"}),
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", mixed_precision=fp32, use_torch_compile=False),
        FSDPOptimizerConfig(lr=0.1, total_training_steps=1, **optimizer),
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
        engine.optimizer_step()
        updated = [p.full_tensor().detach().flatten() for p in engine.module.parameters()]
    log_probs, entropies = (torch.cat(each) for each in zip(*seen))
    return torch.cat(gradients), log_probs, entropies, logits, torch.cat(updated)


theirs = run(FSDPEngineWithLMHead)
frozen = gc.get_freeze_count()
ours = run(TrainedLogitsEngine)
frozen = frozen, gc.get_freeze_count()
optimizer = "actor_rollout_ref.actor.optim.override_optimizer_config."
optimizer = {
    key.removeprefix(optimizer): value
    for key, value in cpu_options(load_settings("cpu")).items()
    if key.startswith(optimizer)
}
fused = run(TrainedLogitsEngine, override_optimizer_config=optimizer)
trained_logits.CHUNK = 4  # so that there are several, and for two rows as many with a rest
chunked = run(TrainedLogitsEngine)
print(json.dumps({
    "frozen": frozen,
    "collected": len(gc.get_objects()),
    "optimizer": optimizer,
    "update": float((ours[4] - fused[4]).abs().max()),
    "gradient": float((ours[0] - fused[0]).abs().max()),
    "differences": [float((a - b).abs().max()) for a, b in zip(theirs[:3], ours[:3])],
    "sizes": [float(a.abs().max()) for a in theirs[:3]],
    "chunked": [float((a - b).abs().max()) for a, b in zip(theirs[:3], chunked[:3])],
    "logits": [theirs[3], ours[3]],
}))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return {size: compare(tmp_path_factory.mktemp("rows"), size) for size in (1, 2)}


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
def test_numbers_are_verls_own(results: dict[int, Any], micro_batch: int, kept: list[int]) -> None:
    result = results[micro_batch]
    assert all(size > 1e-2 for size in result["sizes"])
    assert max(result["differences"] + result["chunked"]) < 1e-5
    theirs, ours = result["logits"]
    assert ours == kept
    assert sum(theirs) > sum(ours)


def test_the_fused_optimizer_makes_the_same_update(results: dict[int, Any]) -> None:
    assert results[1]["optimizer"] == {"fused": True}
    assert results[1]["gradient"] == 0
    assert results[1]["update"] < 1e-6  # of 0.1, the learning rate


def test_a_collection_of_garbage_walks_over_little(results: dict[int, Any]) -> None:
    before, frozen = results[1]["frozen"]  # Python freezes some hundred objects itself
    assert before < 1000
    assert frozen > 20 * results[1]["collected"]
