"""The whole stack, real: a training script of agent-lightning's with one import changed."""

import contextlib
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from empo2.memory.cpu import EXECUTOR, fast_dtype
from empo2.recipe.files.models import resolve_model
from empo2.recipe.launcher.launch import bind

from .stack import CLI, MODEL, environment

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3600)]

SCRIPT = Path(__file__).parents[1] / "examples" / "agent_lightning_script" / "train.py"


def script_overrides(url: str, model: str, folder: Path) -> list[str]:
    """agent-lightning's and verl's own settings, as such a script's user gives them."""
    return [
        f"agentlightning.agl_base_url={url}",
        "agentlightning.agl_key=${oc.env:EMPO2_ADMIN_KEY}",
        "agentlightning.rollout_timeout_seconds=60",
        "agentlightning.local.agent_class=stack_agent:GuessingAgent",
        "+agentlightning.local.env_map.GAME_NUMBER=input.number",
        "+agentlightning.local.env_map.GAME_TROUBLE=sometimes",
        "agentlightning.trace_aggregator.trajectory_max_prompt_length=256",
        "agentlightning.trace_aggregator.trajectory_max_response_length=512",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction=null",
        "data.train_batch_size=2",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.use_torch_compile=false",
        f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={fast_dtype()}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.dtype={fast_dtype()}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.max_model_len=1024",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        "+actor_rollout_ref.rollout.enable_sleep_mode=false",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.agent.num_workers=0",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=empo2.recipe.engine.cpu_worker.CpuWorkerExtension",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend={EXECUTOR}",
        "reward.num_workers=0",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.resume_mode=disable",
        "ray_kwargs.ray_init.num_cpus=3",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        "+empo2.algorithm.memory_probability=1.0",
        "+empo2.algorithm.off_policy_probability=1.0",
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
    ]


def test_agent_lightning_script_with_one_changed_import(tmp_path: Path) -> None:
    """Two off-policy steps of an agent that fails now and then; the failures are counted, the second shows tips.

    `empo2 gateway` and agent-lightning's own `agl-controller` are started by hand.
    """
    model = str(resolve_model(MODEL))
    keys = {"EMPO2_KEY": secrets.token_hex(8), "EMPO2_ADMIN_KEY": secrets.token_hex(8)}
    variables = environment(**keys, VLLM_CPU_KVCACHE_SPACE="1")  # GiB
    with bind("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for command in (
            [*CLI, "gateway", "--profile", "cpu", "tasks.source=null", "--fd", str(listener.fileno())],
            [
                str(Path(sys.executable).with_name("agl-controller")),
                "runner_type=local",
                f"agl_server.url={url}",
                "agl_server.key=${oc.env:EMPO2_KEY}",
                "local_runner.poll_interval=0.5",
                "local_runner.maximum_size=4",
                "hydra.output_subdir=null",
            ],
        ):
            process = subprocess.Popen(command, cwd=tmp_path, env=variables, pass_fds=(listener.fileno(),))
            stack.callback(process.wait, 120)
            stack.callback(process.terminate)
        command = [sys.executable, str(SCRIPT), *script_overrides(url, model, tmp_path)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=tmp_path, env=variables, **pipes)
    assert done.returncode == 0, done.stdout[-5000:]
    steps = [
        {name: float(number) for name, number in re.findall(r"(empo2/\S+?):(?:np.float64\()?([-\d.e]+)", line)}
        for line in done.stdout.splitlines()
        if line.startswith("step:")
    ]
    assert len(steps) == 2
    for numbers in steps:
        assert numbers["empo2/off_policy_fraction"] == 1
        assert numbers["empo2/off_policy_rows"] >= 16 - numbers["empo2/rollouts_dropped"] >= 4
        assert 0 <= numbers["empo2/masked_token_fraction"] < 1
    assert steps[1]["empo2/tips_injected_per_call"] > 0
    assert "empo2/dropped/failed" in done.stdout  # a third of 32 episodes raises
