"""verl's engine with our patches: logits at the trained positions, and a LoRA that is pushed, saved and loaded."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from empo2.memory.cpu import fast_dtype
from empo2.recipe.config import load_settings
from empo2.recipe.files.checkpoints import merged
from empo2.recipe.files.models import SMOLLM2, resolve_model
from empo2.recipe.files.run_directory import write_settings

from .engine_parts import command

pytestmark = pytest.mark.slow

RUN = """
import json, sys

import torch
from recipe.engine_parts import FP32, make, save_llama
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from empo2.recipe.trainer import log_probs as ours_of_logits
from empo2.recipe.trainer.compat.trained_logits import TrainedLogitsEngine

plain, folder, checkpoint, tokenizer = sys.argv[1:]

def batch_of(prompts, responses, attention, mask, micro_batch, packed=False, others=None, **options):
    rows = {"input_ids": torch.cat([prompts, responses], 1), "attention_mask": attention, "response_mask": mask,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0), "prompts": prompts, "responses": responses}
    rows |= others or {}
    data = left_right_2_no_padding(DataProto.from_dict({k: v.clone() for k, v in rows.items()}).to_tensordict())
    tu.assign_non_tensor(data, use_remove_padding=packed, use_fused_kernels=False, use_dynamic_bsz=False,
                         micro_batch_size_per_gpu=micro_batch, max_response_length=8, **options)
    return data

# Trained logits

save_llama(plain, vocab_size=97)

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

def run(engine_class, micro_batch, packed=False, others=None, loss=loss, **options):
    engine = make(plain, engine_class, dict(lr=0.1), mixed_precision=FP32, **options)
    logits, of_layer = [], []
    engine.module.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.shape[1]))
    engine.module.model.layers[0].mlp.register_forward_pre_hook(lambda *_: of_layer.append(1))
    seen.clear()
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        options = dict(packed=packed, others=others, temperature=0.7, calculate_entropy=True)
        engine.forward_backward_batch(batch_of(prompts, responses, attention, mask, micro_batch, **options), loss)
        gradients = [p.grad.full_tensor().flatten().clone() for p in engine.module.parameters()]
    log_probs, entropies, *_ = (torch.cat(each) for each in zip(*seen))
    return torch.cat(gradients), log_probs, entropies, logits, len(of_layer)

def compare(micro_batch, packed=False):
    theirs, ours = (run(kind, micro_batch, packed) for kind in (FSDPEngineWithLMHead, TrainedLogitsEngine))
    ours_of_logits.CHUNK = 4  # several chunks, and for two rows a rest
    chunked = run(TrainedLogitsEngine, micro_batch, packed)
    ours_of_logits.CHUNK = 1024
    return {
        "differences": [gap(a, b) for each in (ours, chunked) for a, b in zip(theirs[:3], each[:3])],
        "sizes": [float(a.abs().max()) for a in theirs[:3]],
        "logits": [theirs[3], ours[3]],
    }

teacher = torch.randint(97, (4, 8, 5))
of_trained = torch.zeros(4, int(mask.sum(1).max()), 5, dtype=torch.long)  # a row's trained tokens alone, in order
for ids, row, trained in zip(of_trained, teacher, mask.bool()):
    ids[:trained.sum()] = row[trained]
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
    ours = run(TrainedLogitsEngine, micro_batch, packed, {"teacher_tokens": of_trained}, taught_loss)
    ours_of_logits.CHUNK = 1024
    return {
        "differences": [gap(a, b) for a, b in zip((theirs, sums), ours[:2])],
        "sizes": [float(a.abs().max()) for a in (theirs, sums)],
        "logits": sum(ours[3]),
    }

def checkpointed():  # as a profile for GPUs trains, in chunks
    ours_of_logits.CHUNK = 4
    kept, again = (run(TrainedLogitsEngine, 2, True, gradient_checkpointing=on) for on in (False, True))
    ours_of_logits.CHUNK = 1024
    return {"differences": [gap(a, b) for a, b in zip(kept[:3], again[:3])], "passes": [kept[4], again[4]]}

def gap(a, b):
    return float((a - b).abs().max())

answers = {
    "checkpointed": checkpointed(),
    "rows": [compare(1), compare(2), compare(2, packed=True)],
    "taught": [taught(1, False), taught(2, False), taught(2, True)],
}

# A LoRA

base = save_llama(folder, vocab_size=49152, initializer_range=0.1)
AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
base_weights = {name: weight.clone() for name, weight in base.state_dict().items()}
prompts, responses = torch.randint(97, (2, 6)), torch.randint(97, (2, 8))
tokens = torch.cat([prompts, responses], 1)

def batch():
    ones = torch.ones(2, 14, dtype=torch.long)
    return batch_of(prompts, responses, ones, ones[:, :8], 2, temperature=1.0, calculate_entropy=False)

def make_lora(**options):
    lora = dict(lora_rank=4, lora_alpha=8, lora={"merge": True})
    return make(folder, optimizer=dict(lr=0.05), model=lora, **options)

def lora_gradients(**options):  # of the second step: at the first, a LoRA's B is 0, and so is the gradient of A
    torch.manual_seed(0)
    engine = make_lora(**options)
    for _ in range(2):
        with engine.train_mode(disable_auto_offload=True):
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(batch(), imitated)
            found = [p.grad.full_tensor().flatten().clone() for p in engine.module.parameters() if p.requires_grad]
            engine.optimizer_step()
    return torch.cat(found)

def imitated(model_output, data, dp_group=None):
    return -model_output["log_probs"].values().sum(), {}

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
    base.load_state_dict({name: weight.float() for name, weight in weights.items()})
    with torch.no_grad():
        logits = base.eval()(tokens).logits[:, 5:-1].log_softmax(-1)
    return logits.gather(2, responses.unsqueeze(2)).squeeze(2)

def equal(a, b):
    return set(a) == set(b) and all(torch.equal(a[name].float(), b[name].float()) for name in b)

answers["own"] = gap(log_probs(make(folder, forward_only=True)), log_probs_of(base_weights))
engine = make_lora()
answers |= {"begins_as_the_base": equal(pushed(engine), base_weights)}
with engine.disable_adapter():  # the first pass of all, as with a KL term
    answers["reference_before"] = gap(log_probs(engine), log_probs_of(base_weights))
for _ in range(8):
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(), imitated)
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
kept, again = lora_gradients(), lora_gradients(gradient_checkpointing=True)
answers["checkpointed_lora"] = gap(kept, again) / float(kept.abs().max())
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoint of a run's LoRA is saved."""
    return tmp_path_factory.mktemp("engine") / "runs" / "mine" / "checkpoints" / "global_step_2" / "actor"


@pytest.fixture(scope="module")
def results(actor: Path) -> Any:
    folder = actor.parents[4]
    paths = [folder / "plain", folder / "model", actor, resolve_model(SMOLLM2)]
    done = subprocess.run(**command(RUN, folder / "rendezvous", *paths), capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_numbers_are_verls_own(results: Any) -> None:
    """Rows have logits at 5 6 7 11 12, one before their tokens, at 2 3 7 and 6 7 8 9; a micro-batch their union."""
    for result, kept in zip(results["rows"], ([5, 3, 1, 4], [7, 4], [8, 4]), strict=True):
        assert all(size > 1e-2 for size in result["sizes"])
        assert max(result["differences"]) < 1e-5
        theirs, ours = result["logits"]
        assert ours == kept
        assert sum(theirs) > sum(ours)


def test_gradient_checkpoints_change_nothing(results: Any) -> None:
    """Two micro-batches, whose layers are computed twice; all weights, and a LoRA's."""
    assert results["checkpointed"]["passes"] == [2, 4]
    assert max(results["checkpointed"]["differences"]) < 1e-5
    assert results["checkpointed_lora"] < 1e-5


def test_the_log_probs_of_a_teachers_tokens(results: Any) -> None:
    """And their gradients, of padded and of packed rows, in chunks."""
    for result, kept in zip(results["taught"], (13, 11, 12), strict=True):
        assert all(size > 1e-2 for size in result["sizes"])
        assert max(result["differences"]) < 1e-4
        assert result["logits"] == kept


def test_a_lora_is_pushed_saved_and_loaded(results: Any, actor: Path) -> None:
    assert results["begins_as_the_base"] and results["resumed"]
    assert results["learned"] > 1, results  # nats
    assert max(results[name] for name in ("own", "reference_before", "reference", "pushed")) < 0.1, results  # bfloat16
    assert results["rounded"] == (fast_dtype() == "bfloat16")  # as vLLM computes
    assert results["trained_on"] == 0  # merging has left the trained weights as they were
    write_settings(load_settings("cpu", ["model.lora_rank=4"]), actor.parents[2])
    exported, pushed = load_file(merged(actor.parent) / "model.safetensors"), load_file(actor / "pushed.safetensors")
    assert {*exported} == {*pushed}
    for name in pushed:
        torch.testing.assert_close(exported[name], pushed[name].bfloat16(), atol=5e-3, rtol=0.02)
