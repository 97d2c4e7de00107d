"""The whole stack, real: ScienceWorld, controller, gateway, vLLM on a CPU, verl, driven as a user would."""

import contextlib
import json
import math
import os
import re
import secrets
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from empo2.memory.cpu import fast_dtype
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.launch import bind
from empo2.recipe.launcher.models import resolve_model
from empo2.recipe.trainer.manager import draw_modes

from .needs import need

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1500)]

CLI = [sys.executable, "-m", "empo2.recipe.cli"]
SCRIPT = Path(__file__).parents[1] / "examples" / "agent_lightning_script" / "train.py"
STEPS = 3
TASKS_PER_STEP, ROLLOUTS_PER_TASK = 3, 2
ROLLOUTS = TASKS_PER_STEP * ROLLOUTS_PER_TASK
SEED = 36


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three steps of agents of every kind, of which the second was begun twice: the trainer was killed in its middle.

    There are nine tasks, one for each kind of agent, and three in a step: each kind is trained once.
    """
    need("pydantic-ai-slim", "autogen-agentchat", "langgraph", "openai-agents", "smolagents")
    directory = tmp_path_factory.mktemp("train")
    run = directory / "runs" / "test"
    arguments = [
        f"run.steps={STEPS}",
        "run.save_every=1",
        "run.name=test",
        "run.resume=auto",
        "run.validate_first=false",
        "agent.class=stack_agent:AnyAgent",
        "agent.env={AGENT: input.agent, AGENT_VARIABLES: input.variables, KIND: input.kind, "
        f"PLAYED: {directory / 'played'}}}",
        "tasks.source=stack_agent:every_kind",
        "memory.scope=[world]",
        "algorithm.success_return=100",
        "algorithm.failure_return=-100",
        f"algorithm.seed={SEED}",
        "algorithm.learning_rate=1e-4",
        "algorithm.return_tolerance=0",  # two rollouts a group, three actions each: few differ by more
        f"algorithm.tasks_per_step={TASKS_PER_STEP}",
        f"algorithm.rollouts_per_task={ROLLOUTS_PER_TASK}",
    ]
    command = [*CLI, "train", "--profile", "cpu", *arguments]
    first = run / "checkpoints" / "global_step_1"
    code, output, errors = _launch(command, directory, kill_trainer_once=lambda: _has_learned_since(first, run))
    assert code == 1
    assert "the same command with run.name=test run.resume=auto continues after step 1\n" in output
    assert errors.startswith("empo2: error: trainer was ended by SIGKILL: the end of "), errors
    code, output, errors = _launch(command, directory)
    assert code == 0, output[-3000:] + errors[-3000:]
    (directory / "output").write_text(output)
    yield run


def _launch(
    command: list[str], directory: Path, kill_trainer_once: Callable[[], bool] = lambda: False
) -> tuple[int, str, str]:
    """Exit code and output of a launcher, none of whose processes may outlive it."""
    started: set[psutil.Process] = set()
    with (directory / "out").open("w") as out, (directory / "err").open("w") as err:
        launcher = psutil.Popen(command, cwd=directory, env=_environment(), stdout=out, stderr=err)
        try:
            while launcher.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    started |= set(launcher.children(recursive=True))
                    if kill_trainer_once():
                        for process in launcher.children():
                            if "--run-directory" in process.cmdline():
                                process.kill()
                        break
                time.sleep(0.5)
            launcher.wait(120)
        finally:
            if launcher.poll() is None:
                launcher.terminate()
    assert len(started) > 5
    assert [process for process in started if _is_alive(process)] == []
    return launcher.returncode, (directory / "out").read_text(), (directory / "err").read_text()


def _environment(**variables: str) -> dict[str, str]:
    """This process's variables, with which a process finds stack_agent.py, too."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _has_learned_since(checkpoint: Path, run: Path) -> bool:
    """Whether the memory holds tips that the checkpoint, once it is whole, does not."""
    return (checkpoint / "complete").exists() and not tips_of(run) <= tips_of(checkpoint)


def tips_of(folder: Path) -> set[str]:
    """The episodes that have left tips in the folder's memory."""
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'memory.sqlite'}?mode=ro", uri=True)) as database:
        return {episode for (episode,) in database.execute("SELECT episode FROM tips")}


def scopes_of(folder: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'memory.sqlite'}?mode=ro", uri=True)) as database:
        return {scope for (scope,) in database.execute("SELECT DISTINCT scope FROM tips")}


def training_tasks(run: Path) -> list[dict[str, str]]:
    return json.loads((run / "tasks.json").read_text())["train"]


def played(run: Path) -> list[tuple[str, str]]:
    """Rollout and kind of each episode that ended well, also those of the step that was cut short."""
    lines = (run.parent.parent / "played").read_text().splitlines()
    return [(rollout, kind) for rollout, _, kind in (line.partition(" ") for line in lines)]


def test_each_mode_was_trained(run: Path) -> None:
    algorithm = load_settings("cpu", [f"algorithm.seed={SEED}"]).algorithm
    drawn = [next(draw_modes(algorithm, step)) for step in range(1, STEPS + 1)]
    assert [(mode.rollout_mode, mode.update_mode) for mode in drawn] == [
        ("no-memory", "on-policy"),
        ("memory", "on-policy"),
        ("memory", "off-policy"),
    ]
    steps = {line["step"]: line for line in metrics_of(run)}
    assert list(steps) == list(range(1, STEPS + 1))
    rows = steps[3]["training/n_sample_trained"]
    assert rows >= ROLLOUTS  # a reply that is tokenised differently when it is sent back opens a row of its own
    assert [steps[i]["empo2/memory_fraction"] for i in (1, 2, 3)] == [0, 1, 1]
    assert [steps[i]["empo2/off_policy_fraction"] for i in (1, 2, 3)] == [0, 0, 1]
    assert [steps[i]["empo2/off_policy_rows"] for i in (1, 2, 3)] == [0, 0, rows]


def test_metrics_are_complete_and_finite(run: Path) -> None:
    names = {
        "training/return",
        "training/intrinsic_return",
        "empo2/memory_fraction",
        "empo2/off_policy_fraction",
        "empo2/off_policy_rows",
        "empo2/masked_token_fraction",
        "empo2/tips_injected_per_call",
        "empo2/tips_written",
        "empo2/reflections_failed",
        "empo2/rollouts_dropped",
        "empo2/memory_size",
        "empo2/unmerged_rollouts",
        "empo2/memory_ms_per_call",
        "actor/entropy",
        "actor/pg_loss",
        "actor/grad_norm",
        "timing_s/step",
    }
    lines = metrics_of(run)
    for line in lines:
        assert names <= line.keys(), names - line.keys()
        assert all(line[name] is not None and math.isfinite(line[name]) for name in names)
        assert line["empo2/rollouts_dropped"] == 0
        assert line["empo2/reflections_failed"] == 0
        assert line["empo2/memory_failures"] == 0
        assert 0 < line["empo2/tips_written"] <= ROLLOUTS  # a tip known word for word is not stored again
        assert 0 < line["training/intrinsic_return"] <= 3  # steps of an episode
        assert -100 <= line["training/return"] <= 100
    assert -100 <= lines[-1]["val/return"] <= 100
    assert 0 <= lines[-1]["val/success_rate"] <= 1
    assert lines[-1]["val/n_rollouts"] == 2


def test_trainer_and_vllm_hold_the_same_weights_at_every_step(run: Path) -> None:
    for line in metrics_of(run):
        if line["empo2/off_policy_fraction"] == 0:
            assert line["rollout_corr/log_ppl_abs_diff"] < 0.05
            # Two short episodes of a task may be worth exactly the same: such a group has nothing to teach.
            assert (line["actor/grad_norm"] > 0) == (line["empo2/groups_without_gradient"] < 1)
    assert any(line["actor/grad_norm"] > 0 for line in metrics_of(run))
    # ... though the weights have changed meanwhile: what agreed at the last on-policy step is not the first model.
    (shard,) = (run / "checkpoints" / f"global_step_{STEPS}" / "actor").glob("model_world_size_1_rank_0.pt")
    trained = torch.load(shard, weights_only=False)
    base = load_file(Path(resolve_model("smollm2-135m-instruct")) / "model.safetensors")
    name = "model.layers.10.mlp.down_proj.weight"
    weight = trained[name].full_tensor() if hasattr(trained[name], "full_tensor") else trained[name]
    assert not torch.equal(weight.bfloat16(), base[name].bfloat16())


def test_memory_was_filled_and_shown_and_is_part_of_the_checkpoint(run: Path) -> None:
    steps = metrics_of(run)
    assert steps[0]["empo2/tips_injected_per_call"] == 0
    assert steps[1]["empo2/tips_injected_per_call"] > 0
    written = [line["empo2/tips_written"] for line in steps]
    assert [line["empo2/memory_size"] for line in steps] == [sum(written[: step + 1]) for step in range(STEPS)]
    snapshot = run / "checkpoints" / f"global_step_{STEPS}" / "memory.sqlite"
    for file in (run / "memory.sqlite", snapshot):
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
            assert database.execute("SELECT count(*) FROM tips").fetchone() == (sum(written),)
            texts = [row[0] for row in database.execute("SELECT text FROM tips")]
    worlds = {task["world"] for task in training_tasks(run)}
    assert scopes_of(run) == {json.dumps({"world": world}) for world in worlds}
    assert not any("<|im_" in text or "\n" in text for text in texts)


def test_agents_of_every_framework_and_world_were_trained_and_reflected_on(run: Path) -> None:
    """All that was played was trained on (no rollout was dropped), and a step trained what no other did."""
    tips = tips_of(run)
    reflected = [kind for rollout, kind in played(run) if rollout in tips]
    tasks = training_tasks(run)
    assert len(tasks) == STEPS * TASKS_PER_STEP
    assert {*reflected} == {task["kind"] for task in tasks}
    assert all(reflected.count(kind) <= ROLLOUTS_PER_TASK for kind in reflected)


def test_a_killed_run_went_on_with_weights_and_memory_of_one_step(run: Path) -> None:
    checkpoints = run / "checkpoints"
    lost = tips_of(run / "set-aside-1") - tips_of(run)
    assert lost  # tips of the second step, which was played anew from the first step's memory
    kept = sorted(folder.name for folder in checkpoints.glob("global_step_*"))
    assert kept == ["global_step_2", "global_step_3"]
    assert tips_of(checkpoints / "global_step_3") == tips_of(run)
    steps = metrics_of(run)
    assert (
        len(tips_of(checkpoints / "global_step_2")) == steps[0]["empo2/tips_written"] + steps[1]["empo2/tips_written"]
    )
    # Adam counts its steps, the one before the kill included.
    optimizer = torch.load(checkpoints / "global_step_3" / "actor" / "optim_world_size_1_rank_0.pt", weights_only=False)
    assert {int(state["step"]) for state in optimizer["state"].values()} == {STEPS}
    # Gateway and trainer: the killed ones' logs are kept.
    assert (run / "set-aside-1" / "trainer.log").stat().st_size > 0


def test_run_folder_and_output(run: Path) -> None:
    for name in ("config.yaml", "trainer.log", "gateway.log", "controller.log", "curves.png", "report.html"):
        assert (run / name).stat().st_size > 0, name
    output = (run.parent.parent / "output").read_text()
    assert "resume after step 1" in output and "step 1/3" not in output and "step 3/3" in output
    assert "Java" in output and "first rollout" in output and str(run / "curves.png") in output.replace("\n", "")
    assert (run / "config.yaml").read_text().count("key: null") == 2


def script_overrides(url: str, model: str, trouble: str, folder: Path) -> list[str]:
    """agent-lightning's and verl's own settings, as such a script's user gives them."""
    return [
        f"agentlightning.agl_base_url={url}",
        "agentlightning.agl_key=${oc.env:EMPO2_ADMIN_KEY}",
        "agentlightning.rollout_timeout_seconds=60",
        "agentlightning.local.agent_class=stack_agent:GuessingAgent",
        "+agentlightning.local.env_map.GAME_NUMBER=input.number",
        f"+agentlightning.local.env_map.GAME_TROUBLE={trouble}",
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
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=empo2.recipe.trainer.compat.vllm.CpuWorkerExtension",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=uni",
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


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    """`empo2 gateway` and agent-lightning's own `agl-controller`, started by hand; URL, model and environment."""
    model = str(resolve_model("smollm2-135m-instruct"))
    environment = _environment(EMPO2_KEY=secrets.token_hex(8), EMPO2_ADMIN_KEY=secrets.token_hex(8))
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
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, pass_fds=(listener.fileno(),))
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        yield url, model, environment


def run_script(script: Path, arguments: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a training script to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def test_agent_lightning_script_with_one_changed_import(
    tmp_path: Path, services: tuple[str, str, dict[str, str]]
) -> None:
    """Two off-policy steps of an agent that fails now and then: the failures are counted and cost nothing else."""
    url, model, environment = services
    output = run_script(SCRIPT, script_overrides(url, model, "sometimes", tmp_path), tmp_path, environment)
    steps = [line for line in output.splitlines() if line.startswith("step:")]
    assert len(steps) == 2
    for line in steps:
        values = dict(part.split(":", 1) for part in line.split(" - "))
        numbers = {
            key: float(text.removeprefix("np.float64(").rstrip(")")) for key, text in values.items() if "empo2/" in key
        }
        assert numbers["empo2/off_policy_fraction"] == 1
        assert numbers["empo2/off_policy_rows"] >= 16 - numbers["empo2/rollouts_dropped"] >= 4
        assert 0 <= numbers["empo2/masked_token_fraction"] < 1
    assert "empo2/dropped/failed" in output  # a fifth of 32 episodes raises


def test_script_as_of_agent_lightnings_gsm8k_example(tmp_path: Path, services: tuple[str, str, dict[str, str]]) -> None:
    """Tasks from parquet, settings as OmegaConf takes them, one import changed; the second step shows tips."""
    url, model, environment = services
    rows = [{"question": f"Which number comes after {n}?", "answer": f"The next. #### {n + 1}"} for n in range(1, 5)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    overrides = [
        word.removeprefix("+")
        for word in script_overrides(url, model, "never", tmp_path)
        if not word.startswith(("hydra.", "agentlightning.agl_base_url", "+agentlightning.local.env_map.GAME_NUMBER"))
    ]
    file = ["--train-file", "rows.parquet", "--val-file", "rows.parquet", "--agl-base-url", url]
    overrides += [
        "agentlightning.local.env_map.GAME_NUMBER=input.answer",
        "actor_rollout_ref.model.use_remove_padding=false",
        "empo2.algorithm.off_policy_probability=0.0",
    ]
    output = run_script(Path(__file__).with_name("gsm8k_script.py"), [*file, *overrides], tmp_path, environment)
    steps = [line for line in output.splitlines() if line.startswith("step:")]
    tips = [float(re.search(r"empo2/tips_injected_per_call:(?:np.float64\()?([\d.]+)", line)[1]) for line in steps]  # pyright: ignore
    assert len(tips) == 2 and tips[1] > 0


def test_init_plays_an_episode_with_a_real_model(tmp_path: Path) -> None:
    quiz = Path(__file__).parents[1] / "examples" / "quiz"
    line = f"{sys.executable} {quiz / 'quiz.py'} {{QUESTION}} {{ANSWER}}"
    env = [word for name in ("question", "answer") for word in ("--env", f"{name.upper()}=input.{name}")]
    done = subprocess.run(
        [
            *[*CLI, "init", "--command", line, "--tasks", str(quiz / "questions.jsonl"), *env],
            *["--env", "AGENT_REWARD=stdout", "--model", "smollm2-135m-instruct", "--time-limit", "300"],
        ],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is being loaded by vLLM" in done.stdout and "the reward was reported" in done.stdout
    assert (tmp_path / "empo2.yaml").is_file()


def test_agent_that_always_fails_ends_the_run_with_one_clear_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *CLI,
            "train",
            "--profile",
            "cpu",
            "run.validate_first=false",
            "agent.class=stack_agent:GuessingAgent",
            "agent.env={GAME_NUMBER: '3', GAME_TROUBLE: always}",
        ],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = done.stderr.splitlines()
    assert "none of 8 rollouts can be used: 8 failed" in line
    assert "RuntimeError: the game server is down (stack_agent.py:" in line and "controller.log" in line
    (run,) = (tmp_path / "runs").iterdir()
    assert "the game server is down" in (run / "controller.log").read_text()
