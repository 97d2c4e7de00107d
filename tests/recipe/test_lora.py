"""A LoRA in verl's engine: what it pushes to vLLM, saves and loads is the policy that it trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from empo2.recipe.config import load_settings
from empo2.recipe.launcher.checkpoints import merged
from empo2.recipe.launcher.model_files import SMOLLM2, resolve_model
from empo2.recipe.launcher.run_directory import write_settings

RUN = """
import json, sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.utils.distributed import initialize_global_process_group_ray

initialize_global_process_group_ray()
from safetensors.torch import save_file
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

folder, checkpoint, tokenizer = sys.argv[1:]
torch.manual_seed(0)
sizes = dict(vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             initializer_range=0.1)
base = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).float()
base.save_pretrained(folder)
AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
base_weights = base.state_dict()
prompts, responses = torch.randint(97, (2, 6)), torch.randint(97, (2, 8))
tokens = torch.cat([prompts, responses], 1)


def batch():
    ones = torch.ones(2, 14, dtype=torch.long)
    rows = {"input_ids": tokens, "attention_mask": ones, "response_mask": ones[:, :8], "prompts": prompts,
            "position_ids": ones.cumsum(1) - 1, "responses": responses}
    data = left_right_2_no_padding(DataProto.from_dict({k: v.clone() for k, v in rows.items()}).to_tensordict())
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=False, use_remove_padding=False,
                         use_fused_kernels=False, use_dynamic_bsz=False, micro_batch_size_per_gpu=2,
                         max_response_length=8)
    return data


def make():
    engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")(
        HFModelConfig(path=folder, enable_gradient_checkpointing=False, lora_rank=4, lora_alpha=8,
                      lora={"merge": True}, override_config={"attn_implementation": "sdpa"}),
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", use_torch_compile=False),
        FSDPOptimizerConfig(lr=0.05, total_training_steps=9),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def pushed(engine):
    return {name: weight.clone() for name, weight in engine.get_per_tensor_param()[0]}


def log_probs(engine):
    found = []

    def loss(model_output, data, dp_group=None):
        found.append(no_padding_2_padding(model_output["log_probs"], data).detach())
        return -model_output["log_probs"].values().sum(), {}

    with torch.no_grad(), engine.eval_mode(disable_auto_offload=True):
        engine.forward_backward_batch(batch(), loss, forward_only=True)
    return found[0]


def log_probs_of(weights):
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    with torch.no_grad():
        logits = model(tokens).logits[:, 5:-1].log_softmax(-1)
    return logits.gather(2, responses.unsqueeze(2)).squeeze(2)


def gap(a, b):
    return float((a - b).abs().max())


def equal(a, b):
    return set(a) == set(b) and all(torch.equal(a[name].float(), b[name].float()) for name in b)


engine = make()
answers = {"begins_as_the_base": equal(pushed(engine), base_weights)}
with engine.disable_adapter():  # the first pass of all, as with a KL term
    answers["reference_before"] = gap(log_probs(engine), log_probs_of(base_weights))
for _ in range(8):
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(
            batch(), lambda model_output, data, dp_group=None: (-model_output["log_probs"].values().sum(), {})
        )
        engine.optimizer_step()
policy, weights = log_probs(engine), pushed(engine)
answers["learned"] = gap(policy, log_probs_of(base_weights))
answers["pushed"] = gap(policy, log_probs_of(weights))
answers["trained_on"] = gap(policy, log_probs(engine))
with engine.disable_adapter():
    answers["reference"] = gap(log_probs(engine), log_probs_of(base_weights))
engine.save_checkpoint(checkpoint, global_step=2)
save_file(weights, checkpoint + "/pushed.safetensors")
resumed = make()
resumed.load_checkpoint(checkpoint)
answers["resumed"] = equal(pushed(resumed), weights)
print(json.dumps(answers))
"""


def test_a_lora_is_pushed_saved_and_loaded(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    actor = run / "checkpoints" / "global_step_2" / "actor"
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # two threads wait for each other where the machine is busy
        "DIST_INIT_METHOD": f"file://{tmp_path / 'rendezvous'}",
        "VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl",
    }
    command = [sys.executable, "-c", RUN, str(tmp_path / "model"), str(actor), str(resolve_model(SMOLLM2))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["begins_as_the_base"] and found["resumed"]
    assert found["learned"] > 1, found  # nats
    assert max(found[name] for name in ("reference_before", "reference", "pushed")) < 0.1, found  # bfloat16
    assert found["trained_on"] == 0  # merging has left the trained weights as they were
    write_settings(load_settings("cpu", ["model.lora_rank=4"]), run)
    exported, pushed = load_file(merged(actor.parent) / "model.safetensors"), load_file(actor / "pushed.safetensors")
    assert {*exported} == {*pushed}
    for name in pushed:
        torch.testing.assert_close(exported[name], pushed[name], atol=5e-3, rtol=0.02)
