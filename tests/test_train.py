"""The whole stack, real: worlds, agents, controller, gateway, vLLM on a CPU, verl, driven as a user would."""

import contextlib
import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch

from empo2.recipe.config import load_settings
from empo2.recipe.evaluation.episode_results import read_results
from empo2.recipe.rollout_log import read_calls, read_rollouts, rollout_files
from empo2.recipe.trainer.manager import draw_modes

from .needs import need
from .processes import marked, marking
from .recipe.published_agents import trained_agents
from .stack import CLI, base_weights, empo2, environment, metrics_of, weights_of
from .stack_tasks import for_validation, of_frameworks, of_published, of_worlds, with_tips

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3600)]

STEPS = 3
TASKS_PER_STEP, ROLLOUTS_PER_TASK = 6, 2
ROLLOUTS = TASKS_PER_STEP * ROLLOUTS_PER_TASK
SEED = 36
VALIDATION_TASKS, VALIDATION_STEPS = 6, 4
METRICS = {
    *("training/return", "training/intrinsic_return", "actor/entropy", "actor/pg_loss", "actor/grad_norm"),
    *("empo2/memory_fraction", "empo2/off_policy_fraction", "empo2/off_policy_rows", "empo2/masked_token_fraction"),
    *("empo2/tips_injected_per_call", "empo2/tips_written", "empo2/reflections_failed", "empo2/rollouts_dropped"),
    *("empo2/memory_size", "empo2/unmerged_rollouts", "empo2/memory_ms_per_call", "timing_s/step"),
}
REPLY_TOKENS = 48  # published agents set no max_tokens, and the small model may write on and on


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of agents of every kind, of which the second was begun twice: the trainer was killed in its middle.

    There are eighteen tasks, one for each kind of agent, and six in a step: each kind is trained once.
    """
    need("pydantic-ai-slim", "autogen-agentchat", "langgraph", "openai-agents", "smolagents")
    directory = tmp_path_factory.mktemp("train")
    run = directory / "runs" / "test"
    for agent in trained_agents():
        agent.need()
        agent.put_into(directory)
    # A step each. The quiz of the first one, which shows no tips, leaves tips for the published agents.
    tasks = [*of_worlds(), *of_frameworks(), *map(of_published, trained_agents()), with_tips()]
    assert len(tasks) == STEPS * TASKS_PER_STEP
    for name, rows in (("tasks", tasks), ("validation", for_validation(VALIDATION_TASKS, VALIDATION_STEPS))):
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    generation = {"max_new_tokens": REPLY_TOKENS, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}
    vllm = f"{{vllm: {{override_generation_config: {json.dumps(json.dumps(generation))}}}}}"
    arguments = [
        f"run.steps={STEPS}",
        "run.save_every=1",
        "run.name=test",
        "run.resume=auto",
        "run.validate_first=false",
        "model.val_temperature=0",
        "agent.class=stack_agent:AnyAgent",
        "agent.env={AGENT: input.agent, AGENT_VARIABLES: input.variables, KIND: input.kind, "
        f"PLAYED: {directory / 'played'}}}",
        "tasks.source=tasks.jsonl",
        "tasks.args={validation: validation.jsonl}",
        "verl.data.shuffle=false",
        "hardware.kv_cache=1",
        "memory.scope=[world]",
        "memory.min_similarity=-1",
        "algorithm.success_return=100",
        "algorithm.failure_return=-100",
        f"algorithm.seed={SEED}",
        "algorithm.learning_rate=1e-4",
        "algorithm.return_tolerance=0",  # two rollouts a group, three actions each: few differ by more
        f"algorithm.tasks_per_step={TASKS_PER_STEP}",
        f"algorithm.rollouts_per_task={ROLLOUTS_PER_TASK}",
        f"verl={{actor_rollout_ref: {{rollout: {{engine_kwargs: {vllm}}}}}}}",
    ]
    command = [*CLI, "train", "--profile", "cpu", *arguments]
    first = run / "checkpoints" / "global_step_1"

    def has_learned_since_it() -> bool:
        return (first / "complete").exists() and not tips_of(run) <= tips_of(first)

    code, output, errors = _launch(command, directory, kill_trainer_once=has_learned_since_it)
    assert code == 1, output[-3000:] + errors[-3000:]
    assert "the same command with run.name=test run.resume=auto continues after step 1\n" in output
    assert errors.startswith("empo2: error: trainer was ended by SIGKILL: the end of "), errors
    code, output, errors = _launch(command, directory)
    assert code == 0, output[-3000:] + errors[-3000:]
    (directory / "output").write_text(output)
    return run


def _launch(
    command: list[str], directory: Path, kill_trainer_once: Callable[[], bool] = lambda: False
) -> tuple[int, str, str]:
    """Exit code and output of a launcher, none of whose processes may outlive it."""
    with marking() as mark, (directory / "out").open("w") as out, (directory / "err").open("w") as err:
        variables = environment(EMPO2_TEST_MARK=mark)
        with psutil.Popen(command, cwd=directory, env=variables, stdout=out, stderr=err) as launcher:
            try:
                while launcher.poll() is None and not kill_trainer_once():
                    time.sleep(0.5)
                if launcher.poll() is None:
                    (trainer,) = [each for each in launcher.children() if "--run-directory" in each.cmdline()]
                    trainer.kill()
                launcher.wait()
            finally:
                if launcher.poll() is None:
                    launcher.terminate()
        assert not marked(mark)
    return launcher.returncode, (directory / "out").read_text(), (directory / "err").read_text()


def column_of(folder: Path, query: str) -> list[Any]:
    """What a query says of the folder's memory."""
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'memory.sqlite'}?mode=ro", uri=True)) as database:
        return [value for (value,) in database.execute(query)]


def tips_of(folder: Path) -> set[str]:
    """The episodes that have left tips in the folder's memory."""
    return {*column_of(folder, "SELECT episode FROM tips")}


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
    lines = metrics_of(run)
    for line in lines:
        assert line.keys() >= METRICS, METRICS - line.keys()
        assert all(line[name] is not None and math.isfinite(line[name]) for name in METRICS)
        assert line["empo2/rollouts_dropped"] == 0
        assert line["empo2/reflections_failed"] == 0
        assert line["empo2/memory_failures"] == 0
        assert 0 < line["empo2/tips_written"] <= ROLLOUTS  # a tip known word for word is not stored again
        assert 0 < line["training/intrinsic_return"] <= line["empo2/calls"] / ROLLOUTS  # at most 1 a call
        assert -100 <= line["training/return"] <= 100
    assert -100 <= lines[-1]["val/return"] <= 100
    assert 0 <= lines[-1]["val/success_rate"] <= 1
    assert lines[-1]["val/n_rollouts"] == VALIDATION_TASKS


def test_trainer_and_vllm_hold_the_same_weights_at_every_step(run: Path) -> None:
    for line in metrics_of(run):
        if line["empo2/off_policy_fraction"] == 0:
            assert line["rollout_corr/log_ppl_abs_diff"] < 0.05
            # Two short episodes of a task may be worth exactly the same: such a group has nothing to teach.
            assert (line["actor/grad_norm"] > 0) == (line["empo2/groups_without_gradient"] < 1)
    assert any(line["actor/grad_norm"] > 0 for line in metrics_of(run))
    # ... though the weights have changed meanwhile: what agreed at the last on-policy step is not the first model.
    name = "model.layers.10.mlp.down_proj.weight"
    assert not torch.equal(weights_of(run, STEPS)[name].bfloat16(), base_weights()[name].bfloat16())


def test_memory_was_filled_and_shown_and_is_part_of_the_checkpoint(run: Path) -> None:
    steps = metrics_of(run)
    assert steps[0]["empo2/tips_injected_per_call"] == 0
    assert steps[1]["empo2/tips_injected_per_call"] > 0
    written = [line["empo2/tips_written"] for line in steps]
    assert [line["empo2/memory_size"] for line in steps] == [sum(written[: step + 1]) for step in range(STEPS)]
    for folder in (run, run / "checkpoints" / f"global_step_{STEPS}"):
        texts = column_of(folder, "SELECT text FROM tips")
        assert len(texts) == sum(written)
    tips = tips_of(run)
    reflected = {kind for rollout, kind in played(run) if rollout in tips}
    worlds = {task["world"] for task in training_tasks(run) if task["kind"] in reflected}
    assert {*column_of(run, "SELECT scope FROM tips")} == {json.dumps({"world": world}) for world in worlds}
    assert not any("<|im_" in text or "\n" in text for text in texts)


def test_agents_of_every_framework_and_world_were_trained_and_reflected_on(run: Path) -> None:
    """All that was played was trained on (no rollout was dropped), and a step trained what no other did.

    Published agents, which stream with a tool by /responses, chat completions and /messages, were shown tips.
    """
    tips, helped = tips_of(run), {*column_of(run, "SELECT episode FROM plays WHERE hits > 0")}
    reflected = [kind for rollout, kind in played(run) if rollout in tips]
    missing = {task["kind"] for task in training_tasks(run)} - {*reflected}
    refused = sum(line["empo2/tips_refused"] for line in metrics_of(run))  # for what the model happens to say
    assert len(missing) <= refused // ROLLOUTS_PER_TASK, missing
    assert all(reflected.count(kind) <= ROLLOUTS_PER_TASK for kind in reflected)
    assert {agent.name for agent in trained_agents()} <= {kind for rollout, kind in played(run) if rollout in helped}


def test_evaluation_of_the_checkpoint_equals_the_validation_of_its_step(run: Path, tmp_path: Path) -> None:
    """At temperature 0, and in most episodes: a batch of another size may round a tie between two tokens otherwise."""
    rows = json.loads((run / "tasks.json").read_text())["val"]
    panel = {"description": "The run's validation tasks.", "group": [], "config": {}, "common": {}, "rows": rows}
    (tmp_path / "panel.json").write_text(json.dumps(panel))
    empo2(tmp_path, "eval", str(run), "--panel", "panel.json", "--samples", "1", "--output", "out")
    results = read_results(tmp_path / "out")
    assert not any(each.failed or each.return_ is None for each in results)
    evaluated = Counter(
        (each.calls, each.prompt_tokens, each.reply_tokens, round(each.return_ or 0, 3)) for each in results
    )
    log = run / "rollouts"
    rollouts = [each for each in read_rollouts(log, step=STEPS) if each.phase == "validation"]
    assert not any(each.return_ is None for each in rollouts)
    validated: Counter[Any] = Counter()
    for rollout in rollouts:
        calls = read_calls(log, rollout.id)
        prompt_tokens, replies = sum(call["prompt_tokens"] for call in calls), [call["response_ids"] for call in calls]
        validated[len(calls), prompt_tokens, sum(map(len, replies)), round(rollout.return_ or 0, 3)] += 1
    assert evaluated.total() == validated.total() == VALIDATION_TASKS
    assert (evaluated & validated).total() > VALIDATION_TASKS / 2, (evaluated, validated)
    returns = [each.return_ or 0.0 for each in rollouts]
    assert metrics_of(run)[-1]["val/return"] == pytest.approx(sum(returns) / VALIDATION_TASKS)


def test_a_killed_run_went_on_with_weights_and_memory_of_one_step(run: Path) -> None:
    checkpoints = run / "checkpoints"
    lost = tips_of(run / "set-aside-1") - tips_of(run)
    assert lost  # tips of the second step, which was played anew from the first step's memory
    kept = sorted(folder.name for folder in checkpoints.glob("global_step_*"))
    assert kept == ["global_step_2", "global_step_3"]
    assert tips_of(checkpoints / "global_step_3") == tips_of(run)
    written = [line["empo2/tips_written"] for line in metrics_of(run)]
    assert len(tips_of(checkpoints / "global_step_2")) == sum(written[:2])
    # Adam counts its steps, the one before the kill included.
    optimizer = torch.load(checkpoints / "global_step_3" / "actor" / "optim_world_size_1_rank_0.pt", weights_only=False)
    assert {int(state["step"]) for state in optimizer["state"].values()} == {STEPS}
    # Gateway and trainer: the killed ones' logs are kept.
    assert (run / "set-aside-1" / "trainer.log").stat().st_size > 0


def test_all_rollouts_are_kept_with_what_was_trained_and_masked(run: Path) -> None:
    """Each step once, though one was begun twice."""
    files = rollout_files(run / "rollouts")
    names = ["000001-training-01", "000002-training-01", "000003-training-01", "000003-validation-01"]
    assert [file.stem for file in files] == names
    steps = [pq.read_table(file).to_pylist() for file in files]
    assert [len({row["rollout"] for row in rows}) for rows in steps] == [ROLLOUTS] * STEPS + [VALIDATION_TASKS]
    for rows, metrics in zip(steps, metrics_of(run), strict=False):
        assert {row["advantage"] is None for row in rows} == {False}
        known = [row for row in rows if row["masked"] is not None]
        trained, masked = (sum(sum(row[name]) for row in known) for name in ("trained", "masked"))
        assert trained > 0
        assert metrics["empo2/masked_token_fraction"] == pytest.approx(masked / trained)
        tips = [text for row in rows for text in row["tips"]]
        assert all(tips) and bool(tips) == (metrics["empo2/tips_injected_per_call"] > 0)


def test_run_folder_and_output(run: Path) -> None:
    for name in ("config.yaml", "trainer.log", "gateway.log", "controller.log", "report.html"):
        assert (run / name).stat().st_size > 0, name
    output = (run.parent.parent / "output").read_text()
    assert "resume after step 1" in output and "step 1/3" not in output and "step 3/3" in output
    assert "Java" in output and "first rollout" in output and str(run / "report.html") in output.replace("\n", "")
    assert "key" not in (run / "config.yaml").read_text()
