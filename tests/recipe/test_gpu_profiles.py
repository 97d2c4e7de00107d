"""The profiles for GPUs, checked by verl's own rules on a machine without one, and the proof for machines with one."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.trainer.verl_config import build_verl_config, read_settings

MODELS = {
    "gpu": "Qwen/Qwen2.5-7B-Instruct",
    "gpu-1": "Qwen/Qwen2.5-1.5B-Instruct",
    "gpu-24": "Qwen/Qwen2.5-1.5B-Instruct",
}


def config_of(profile: str, *overrides: str) -> DictConfig:
    settings = load_settings(profile, ["agent.class=a:B", "tasks.source=a:b", *overrides])
    return build_verl_config(
        settings, model_path=settings.model.path, run_directory=Path("runs"), gateway_url="", gateway_key=""
    )


@pytest.mark.parametrize("profile", MODELS)
def test_verl_accepts_a_profile(profile: str) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = config_of(profile)
    validate_config(config, need_reference_policy(config), need_critic(config))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert config.actor_rollout_ref.model.path == MODELS[profile]
    # One row a pass: rows of different lengths would get a dense mask, with which sdpa has no flash kernel.
    assert (actor.strategy, actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz) == ("fsdp2", 1, False)
    assert actor.fsdp_config.forward_prefetch == (profile == "gpu")
    assert (rollout.enforce_eager, rollout.enable_prefix_caching, rollout.free_cache_engine) == (False, True, True)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("verl.actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "rows would get into wrong updates"),
        ("verl.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2", "rows would get into wrong"),
        ("verl.actor_rollout_ref.actor.strategy=megatron", "strategy='megatron': must be fsdp2"),
        ("verl.algorithm.rollout_correction.rollout_is=token", "vLLM's are the old ones.*take it out"),
    ],
)
def test_what_would_train_something_else_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of("gpu", override)


def test_a_script_of_the_users_own_is_refused_as_well() -> None:
    config = config_of("gpu")
    assert read_settings(config).hardware.gpus_per_node == 8
    config.actor_rollout_ref.actor.ulysses_sequence_parallel_size = 4
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=4"):
        read_settings(config)


def test_the_proof_for_gpus_runs_on_a_cpu_and_says_what_failed() -> None:
    script = Path(__file__).parents[2] / "bench" / "gpu_proof.py"
    done = subprocess.run([sys.executable, str(script), "--device", "cpu"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "PASS"), done.stdout + done.stderr
    wrong = (
        "import sys, runpy; from empo2.recipe.trainer import log_probs; right = log_probs.log_probs_of\n"
        "log_probs.log_probs_of = lambda *given, **options: [2 * each for each in right(*given, **options)]\n"
        "sys.argv = ['gpu_proof', '--device', 'cpu']; runpy.run_path(sys.orig_argv[-1], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", wrong, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "FAIL: log-probs"), done.stdout + done.stderr
