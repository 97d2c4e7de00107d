"""The profiles for GPUs, checked by verl's own rules on a machine without one, and the proof for machines with one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher import estimate, machine
from empo2.recipe.protocol import KEY_CHECK
from empo2.recipe.trainer.verl_config import build_verl_config, read_settings

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import gpu_runs  # noqa: E402

MODELS = {"gpu": "7B", "gpu-1": "1.5B", "gpu-24": "1.5B"}


# The arguments that verl makes of a profile, read by vLLM's own parser; the server itself is not started.
PARSE = """
import asyncio, json, sys
from pathlib import Path
from types import SimpleNamespace

from empo2.recipe.config import load_settings
from empo2.recipe.trainer.verl_config import build_verl_config, name_middleware
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.vllm_rollout.vllm_async_server import AsyncEngineArgs, vLLMHttpServer

class Server(vLLMHttpServer):
    def __init__(self, config):
        model = config.actor_rollout_ref.model
        self.config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        self.model_config = SimpleNamespace(
            local_path=model.path, trust_remote_code=False, lora=model.lora, lora_rank=model.lora_rank
        )
        self.replica_rank, self.node_rank, self.nnodes = 1, 0, 1  # the first one would print its arguments
        self.profiler_controller = SimpleNamespace(config=None, tool_config=None)

    async def run_server(self, arguments):
        engine = AsyncEngineArgs.from_cli_args(arguments)
        names = ("model", "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
                 "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill",
                 "enable_sleep_mode", "enable_lora")
        found[profile] = {name: getattr(engine, name) for name in names} | {
            name: getattr(arguments, name) for name in ("middleware", "enable_auto_tool_choice", "tool_call_parser")}

found = {}
for profile in sys.argv[1:]:
    settings = load_settings(profile, ["agent.class=a:B", "tasks.source=a:b"])
    config = build_verl_config(settings, model_path=settings.model.path, run_directory=Path("runs"), gateway_url="",
                               gateway_key="", tool_parser="hermes")
    name_middleware(config, settings)
    asyncio.run(Server(config).launch_server())
print(json.dumps(found))
"""


def config_of(profile: str, *overrides: str) -> DictConfig:
    settings = load_settings(profile, ["agent.class=a:B", "tasks.source=a:b", *overrides])
    given: dict[str, Any] = {"model_path": settings.model.path, "gateway_url": "", "gateway_key": ""}
    return build_verl_config(settings, run_directory=Path("runs"), **given)


@pytest.mark.parametrize("profile", MODELS)
def test_verl_accepts_a_profile(profile: str) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = config_of(profile)
    validate_config(config, need_reference_policy(config), need_critic(config))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert config.actor_rollout_ref.model.path == f"Qwen/Qwen2.5-{MODELS[profile]}-Instruct"
    # One row a pass: rows of different lengths would get a dense mask, with which sdpa has no flash kernel.
    assert (actor.strategy, actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz) == ("fsdp2", 1, False)
    assert actor.fsdp_config.forward_prefetch == (profile == "gpu")
    assert (rollout.enforce_eager, rollout.enable_prefix_caching, rollout.free_cache_engine) == (False, True, True)


def test_vllm_accepts_the_profiles() -> None:
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl",
    }
    done = subprocess.run([sys.executable, "-c", PARSE, *MODELS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for profile in MODELS:
        hardware, given = load_settings(profile).hardware, load_settings(profile).model
        assert found[profile] == {
            "model": given.path,
            "tensor_parallel_size": hardware.tensor_parallel,
            "max_model_len": given.max_context_tokens,
            "max_num_seqs": hardware.max_sequences,
            "max_num_batched_tokens": max(8192, given.max_context_tokens),
            "gpu_memory_utilization": hardware.gpu_memory_fraction,
            **dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill", "enable_sleep_mode"), True),
            "enforce_eager": False,
            "enable_lora": None,  # it is merged
            "middleware": [KEY_CHECK],
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
        }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("verl.actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "rows would get into wrong updates"),
        ("verl.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2", "rows would get into wrong"),
        ("verl.actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", "ref.ulysses_sequence_parallel_size=2: rows"),
        ("verl.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=2", "ref.fsdp_config.*=2: rows"),
        ("verl.actor_rollout_ref.actor.strategy=megatron", "strategy='megatron': must be fsdp2"),
        ("verl.actor_rollout_ref.actor.strategy=fsdp", "actor.strategy='fsdp': must be fsdp2$"),
        ("verl.actor_rollout_ref.ref.strategy=megatron", "ref.strategy='megatron': must be fsdp2"),
        ("verl.actor_rollout_ref.actor.use_dynamic_bsz=True", "use_dynamic_bsz=True: sdpa gets a dense mask"),
        ("verl.algorithm.rollout_correction.rollout_is=token", "vLLM's are the old ones.*take it out"),
    ],
)
def test_what_would_train_something_else_is_refused_in_a_script_too(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of("gpu", override)
    config = config_of("gpu")
    assert read_settings(config).hardware.gpus_per_node == 8
    config.actor_rollout_ref.actor.strategy = "fsdp"  # as in a script that does not choose
    assert read_settings(config).hardware.gpus_per_node == 8
    config.empo2.algorithm.off_policy_loss = "distillation"
    with pytest.raises(ConfigError, match=r"strategy='fsdp': does not give the log-probs .* set it to fsdp2"):
        read_settings(config)
    config.actor_rollout_ref.actor.ulysses_sequence_parallel_size = 4
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=4"):
        read_settings(config)


def test_the_proof_for_gpus_runs_on_a_cpu_and_says_what_failed() -> None:
    script = BENCH / "gpu_proof.py"
    wrong = (
        "import sys, runpy; from empo2.recipe.trainer import log_probs; right = log_probs.log_probs_of\n"
        "log_probs.log_probs_of = lambda *given, **options: [2 * each for each in right(*given, **options)]\n"
        "sys.argv = ['gpu_proof', '--device', 'cpu']; runpy.run_path(sys.orig_argv[-1], run_name='__main__')"
    )
    path = {**os.environ, "PYTHONPATH": str(BENCH)}  # where `python SCRIPT` looks by itself
    for words, result in (([script, "--device", "cpu"], (0, "PASS")), (["-c", wrong, script], (1, "FAIL: log-probs"))):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=path)
        assert (done.returncode, done.stdout.splitlines()[-1]) == result, done.stdout + done.stderr


def _steps(*returns: float | None) -> list[dict[str, Any]]:
    rows = [{"step": step, "val/return": value, "timing_s/step": 90.0} for step, value in enumerate(returns)]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


@pytest.mark.parametrize(
    ("returns", "passed"),
    [
        ((-60.0, None, 20.0), True),
        ((-60.0, None, -60.0), False),  # does not rise
        ((-60.0, 20.0), False),  # ended before step 2
        ((None, None, 20.0), False),  # nothing to compare with
    ],
)
def test_the_tier_learning_asks_for_a_curve_that_rises(returns: tuple[float | None, ...], passed: bool) -> None:
    part = gpu_runs.curve("empo2", _steps(*returns), 2, rises=True)
    assert part.passed == passed
    if passed:
        assert part.found == "return -60 at 0, 20 at 2; 0.1 hours"
    assert gpu_runs.curve("grpo", _steps(-60.0, -60.0, -60.0), 2, rises=False).passed


def test_the_peak_is_held_against_the_estimate_of_the_longest_row() -> None:
    settings = gpu_runs._settings(["--config", str(gpu_runs.HOUSES), *gpu_runs._SIZES[False]])
    steps = [{"prompt_length/max": 300.0, "response_length/max": 200.0}]
    small = {"max_prompt_tokens": 499, "max_episode_tokens": 1}
    rows = settings.model_copy(update={"model": settings.model.model_copy(update=small)})
    shape = estimate.SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"]
    expected = sum(machine.cpu_memory(rows, shape).values())
    for share, close in ((0.79, False), (0.81, True), (1.19, True), (1.21, False)):
        trainings = [gpu_runs.Training("", 0.0, share * expected)]
        part = gpu_runs._memory(settings, trainings, steps, gpu=False)
        assert part.passed == close and "for rows of 500 tokens" in part.found
