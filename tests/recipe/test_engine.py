"""verl's engine with our patches: logits at the trained positions alone, and a LoRA that is pushed, saved and loaded.

Where tokens are trained, log-probs, entropies, gradients and updates are verl's; elsewhere are no logits. The log-probs
of a teacher's tokens are the plain model's. What vLLM gets of a LoRA, and what is saved and loaded, is the policy that
is trained.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from empo2.memory.cpu import fast_dtype
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.checkpoints import merged
from empo2.recipe.launcher.model_files import SMOLLM2, resolve_model
from empo2.recipe.launcher.run_directory import write_settings

RUN = """
import gc, json, sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.utils.distributed import initialize_global_process_group_ray

initialize_global_process_group_ray()
from safetensors.torch import save_file
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from agentlightning.verl.per_rollout_loss import PER_ROLLOUT_MEAN_LOSS_MODE
from verl.workers.config import (
    FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig,
)
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from empo2.recipe.config import load_settings
from empo2.recipe.trainer import log_probs as ours_of_logits
from empo2.recipe.trainer.compat.trained_logits import TrainedLogitsEngine
from empo2.recipe.trainer.objective import hybrid_loss
from empo2.recipe.trainer.verl_config import cpu_options

plain, folder, checkpoint, tokenizer = sys.argv[1:]
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


def batch_of(prompts, responses, attention, mask, micro_batch, packed=False, others=None, **options):
    rows = {"input_ids": torch.cat([prompts, responses], 1), "attention_mask": attention, "response_mask": mask,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0), "prompts": prompts, "responses": responses}
    rows |= others or {}
    data = left_right_2_no_padding(DataProto.from_dict({k: v.clone() for k, v in rows.items()}).to_tensordict())
    tu.assign_non_tensor(data, use_remove_padding=packed, use_fused_kernels=False, use_dynamic_bsz=False,
                         micro_batch_size_per_gpu=micro_batch, max_response_length=8, **options)
    return data


def make(kind, path, model, optimizer, **options):
    engine = kind(
        HFModelConfig(path=path, enable_gradient_checkpointing=False,
                      override_config={"attn_implementation": "sdpa"}, **model),
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", use_torch_compile=False, **options),
        FSDPOptimizerConfig(**optimizer),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


# Trained logits

torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).save_pretrained(plain)

# Rows of different lengths, two turns each; the third has no trained token, as a filler.
prompts, responses = torch.randint(97, (4, 6)), torch.randint(97, (4, 8))
attention = torch.ones(4, 14, dtype=torch.long)
attention[1, :3] = attention[2, :5] = 0
attention[2, 7:] = attention[3, 11:] = 0
mask = torch.zeros(4, 8, dtype=torch.long)
mask[0, :3] = mask[0, 6:] = mask[1, :2] = mask[1, 5] = mask[3, 1:5] = 1


seen = []


def loss(model_output, data, dp_group=None):
    tokens = data["response_mask"].bool()
    log_prob, entropy = (no_padding_2_padding(model_output[key], data) for key in ("log_probs", "entropy"))
    seen.append((log_prob.detach() * tokens, entropy.detach() * tokens))
    return ((log_prob * log_prob.sin() + 0.3 * entropy) * tokens).sum(), {}


fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def run(engine_class, micro_batch, packed=False, others=None, loss=loss, **optimizer):
    optimizer = dict(lr=0.1, total_training_steps=1, **optimizer)
    engine = make(engine_class, plain, {"load_tokenizer": False}, optimizer, mixed_precision=fp32)
    logits = []
    engine.module.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.shape[1]))
    seen.clear()
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        options = dict(packed=packed, others=others, temperature=0.7, calculate_entropy=True)
        data = batch_of(prompts, responses, attention, mask, micro_batch, **options)
        engine.forward_backward_batch(data, loss)
        gradients = [p.grad.full_tensor().flatten().clone() for p in engine.module.parameters()]
        engine.optimizer_step()
        updated = [p.full_tensor().detach().flatten() for p in engine.module.parameters()]
    log_probs, entropies, *_ = (torch.cat(each) for each in zip(*seen))
    return torch.cat(gradients), log_probs, entropies, logits, torch.cat(updated)


def compare(micro_batch, packed=False):
    theirs, ours = (run(kind, micro_batch, packed) for kind in (FSDPEngineWithLMHead, TrainedLogitsEngine))
    ours_of_logits.CHUNK = 4  # several chunks, and for two rows a rest
    chunked = run(TrainedLogitsEngine, micro_batch, packed)
    ours_of_logits.CHUNK = 1024
    return {
        "differences": [float((a - b).abs().max()) for each in (ours, chunked) for a, b in zip(theirs[:3], each[:3])],
        "sizes": [float(a.abs().max()) for a in theirs[:3]],
        "logits": [theirs[3], ours[3]],
    }


teacher = torch.randint(97, (4, 8, 5))
share = torch.rand(4, 8, 5)


def taught_loss(model_output, data, dp_group=None):
    student = no_padding_2_padding(model_output["student_log_probs"], data)
    of = share[[int((prompts == row).all(1).nonzero()[0]) for row in data["prompts"]]]
    kept = student * data["response_mask"].unsqueeze(-1)
    seen.append((kept.detach().sum(-1), student.detach().sum(-1)))
    return (kept * of).sum(), {}


def taught(micro_batch, packed):
    model = LlamaForCausalLM.from_pretrained(plain)
    sums = torch.zeros(4, 8)
    for row in range(4):
        ids = torch.cat([prompts[row], responses[row]])[attention[row].bool()]
        begin, size = int(attention[row, :6].sum()), int(attention[row, 6:].sum())
        log_probs = (model(ids[None]).logits[0].float() / 0.7).log_softmax(-1)[begin - 1 : begin + size - 1]
        kept = log_probs.gather(1, teacher[row, :size]) * mask[row, :size, None]
        (kept * share[row, :size]).sum().backward()
        sums[row, :size] = kept.detach().sum(-1)
    theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
    ours_of_logits.CHUNK = 4
    ours = run(TrainedLogitsEngine, micro_batch, packed, {"teacher_tokens": teacher}, taught_loss)
    ours_of_logits.CHUNK = 1024
    return {
        "differences": [float((a - b).abs().max()) for a, b in zip((theirs, sums), ours[:2])],
        "sizes": [float(a.abs().max()) for a in (theirs, sums)],
        "logits": sum(ours[3]),
    }


def distilled(**options):
    log_probs, ids = (0.5 * torch.randn(4, 8, 97)).log_softmax(-1).topk(20)
    tokens, rows = mask.sum(1), torch.ones(4, dtype=torch.bool)
    others = {
        "teacher_tokens": ids.int(), "teacher_log_probs": log_probs, "distilled": mask.any(1), "off_policy": rows,
        "memory": rows, "first_index": 8 * torch.arange(4), "token_weight": 1 / (3 * tokens.clamp_min(1)),
        "advantages": 0.0 * mask, "old_log_probs": -2.0 * mask,
    }
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1, clip_ratio_low=0.2,
        clip_ratio_high=0.3, clip_ratio_c=10.0, policy_loss=PolicyLossConfig(loss_mode=PER_ROLLOUT_MEAN_LOSS_MODE),
    )
    engine = make(
        TrainedLogitsEngine, plain, {"load_tokenizer": False}, dict(lr=0.02, total_training_steps=40),
        mixed_precision=fp32,
    )
    kls = []

    def loss(model_output, data, dp_group=None):
        loss, metrics = hybrid_loss(config, model_output, data, mask_threshold=0.0, distillation=1.0, **options)
        kls[-1] += metrics["distillation_kl"].aggregate() / int(tokens.sum())
        return loss, {}

    for _ in range(30):
        kls.append(0.0)
        with engine.train_mode(disable_auto_offload=True):
            engine.optimizer_zero_grad()
            data = batch_of(prompts, responses, attention, mask, 2, others=others, temperature=1.0, dp_size=1)
            engine.forward_backward_batch(data, loss)
            engine.optimizer_step()
    return [kls[0], kls[-1]]


frozen = gc.get_freeze_count()
ours = run(TrainedLogitsEngine, 1)
answers = {"frozen": [frozen, gc.get_freeze_count()], "collected": len(gc.get_objects())}
name = "actor_rollout_ref.actor.optim.override_optimizer_config."
options = cpu_options(load_settings("cpu")).items()
optimizer = {key.removeprefix(name): value for key, value in options if key.startswith(name)}
fused = run(TrainedLogitsEngine, 1, override_optimizer_config=optimizer)
answers |= {
    "optimizer": optimizer,
    "update": float((ours[4] - fused[4]).abs().max()),
    "gradient": float((ours[0] - fused[0]).abs().max()),
    "rows": [compare(1), compare(2), compare(2, packed=True)],
    "distilled": [distilled(), distilled(reverse=True)],
    "taught": [taught(1, False), taught(2, False), taught(2, True)],
}


# A LoRA

torch.manual_seed(0)
sizes |= dict(vocab_size=49152, initializer_range=0.1)
base = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).float()
base.save_pretrained(folder)
AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
base_weights = base.state_dict()
prompts, responses = torch.randint(97, (2, 6)), torch.randint(97, (2, 8))
tokens = torch.cat([prompts, responses], 1)


def batch():
    ones = torch.ones(2, 14, dtype=torch.long)
    return batch_of(prompts, responses, ones, ones[:, :8], 2, temperature=1.0, calculate_entropy=False)


def make_lora():
    kind = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    lora = dict(lora_rank=4, lora_alpha=8, lora={"merge": True})
    return make(kind, folder, lora, dict(lr=0.05, total_training_steps=9))


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


engine = make_lora()
answers |= {"begins_as_the_base": equal(pushed(engine), base_weights)}
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
answers["rounded"] = all(torch.equal(weight, weight.bfloat16().to(weight.dtype)) for weight in weights.values())
answers["trained_on"] = gap(policy, log_probs(engine))
with engine.disable_adapter():
    answers["reference"] = gap(log_probs(engine), log_probs_of(base_weights))
engine.save_checkpoint(checkpoint, global_step=2)
save_file(weights, checkpoint + "/pushed.safetensors")
resumed = make_lora()
resumed.load_checkpoint(checkpoint)
answers["resumed"] = equal(pushed(resumed), weights)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoint of a run's LoRA is saved."""
    return tmp_path_factory.mktemp("engine") / "runs" / "mine" / "checkpoints" / "global_step_2" / "actor"


@pytest.fixture(scope="module")
def results(actor: Path) -> Any:
    folder = actor.parents[4]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # two threads wait for each other where the machine is busy
        "DIST_INIT_METHOD": f"file://{folder / 'rendezvous'}",
        "VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl",
    }
    paths = [folder / "plain", folder / "model", actor, resolve_model(SMOLLM2)]
    command = [sys.executable, "-c", RUN, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_numbers_are_verls_own(results: Any) -> None:
    """Logits are those of the union over a micro-batch, of packed rows those of each row.

    Row 0 has 5 6 7 11 12 (one before its tokens), row 1 has 2 3 7, row 3 has 6 7 8 9.
    """
    for result, kept in zip(results["rows"], ([5, 3, 1, 4], [7, 4], [8, 4]), strict=True):
        assert all(size > 1e-2 for size in result["sizes"])
        assert max(result["differences"]) < 1e-5
        theirs, ours = result["logits"]
        assert ours == kept
        assert sum(theirs) > sum(ours)


def test_the_log_probs_of_a_teachers_tokens(results: Any) -> None:
    """And their gradients, of padded and of packed rows, in chunks."""
    for result, kept in zip(results["taught"], (13, 11, 12), strict=True):
        assert all(size > 1e-2 for size in result["sizes"])
        assert max(result["differences"]) < 1e-4
        assert result["logits"] == kept


def test_a_policy_is_distilled(results: Any) -> None:
    """Through engine and loss: on the trained positions the student becomes the teacher."""
    for before, after in results["distilled"]:
        assert before > 0.05 and after < before / 5, results["distilled"]


def test_the_fused_optimizer_makes_the_same_update(results: Any) -> None:
    assert results["optimizer"] == {"fused": True}
    assert results["gradient"] == 0
    assert results["update"] < 1e-6  # of 0.1, the learning rate


def test_a_collection_of_garbage_walks_over_little(results: Any) -> None:
    before, frozen = results["frozen"]  # Python freezes some hundred objects itself
    assert before < 1000
    assert frozen > 20 * results["collected"]


def test_a_lora_is_pushed_saved_and_loaded(results: Any, actor: Path) -> None:
    assert results["begins_as_the_base"] and results["resumed"]
    assert results["learned"] > 1, results  # nats
    assert max(results[name] for name in ("reference_before", "reference", "pushed")) < 0.1, results  # bfloat16
    assert results["rounded"] == (fast_dtype() == "bfloat16")  # as vLLM computes
    assert results["trained_on"] == 0  # merging has left the trained weights as they were
    write_settings(load_settings("cpu", ["model.lora_rank=4"]), actor.parents[2])
    exported, pushed = load_file(merged(actor.parent) / "model.safetensors"), load_file(actor / "pushed.safetensors")
    assert {*exported} == {*pushed}
    for name in pushed:
        torch.testing.assert_close(exported[name], pushed[name].bfloat16(), atol=5e-3, rtol=0.02)
