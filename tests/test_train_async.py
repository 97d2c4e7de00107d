"""The whole stack, real: rollouts that outlive their step; a run that SIGTERM ends in a step, and resumes."""

import contextlib
import json
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from empo2.memory.cpu import fast_dtype
from empo2.recipe.files.models import resolve_model
from empo2.recipe.rollout_log import rollout_files

from .processes import until
from .recipe.otlp_receiver import OtlpReceiver
from .stack import CLI, MODEL, empo2, environment, metrics_of, weights_of

# Minutes by itself. CI runs it after `make test`; `make test-all` does, too.
pytestmark = [pytest.mark.stack, pytest.mark.rare, pytest.mark.timeout(3600)]

STEPS, AT_ONCE, PER_STEP, GROUP = 3, 4, 2, 2  # groups that are played at once, and trained in a step
SEED = 24  # the first step issues groups of all three modes, the second off-policy and on-policy with tips


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver().serve() as receiver:
        yield receiver


def listening(launcher: psutil.Process) -> list[tuple[str, str]]:
    """Name and address of all that listens among a process and its descendants."""
    found = []
    for process in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended
            sockets = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            found += [(process.name(), each.laddr.ip) for each in sockets]
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Path:
    directory = tmp_path_factory.mktemp("async")
    run = directory / "runs" / "test"
    arguments = [
        "run.name=test",
        f"run.steps={STEPS}",
        "run.validate_first=false",
        "run.save_every=1",
        f"run.keep_checkpoints={STEPS}",
        "verl.actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        "agent.class=stack_agent:PacedAgent",
        f"agent.env={{NAME: input.name, PACE: input.pace, METRICS: {run / 'metrics.jsonl'}}}",
        "agent.concurrency=8",
        "hardware.kv_cache=1",
        f"gateway.traces={receiver.url}",
        "tasks.source=stack_agent:paces",
        "verl.data.shuffle=false",
        "memory.scope=all-tasks",
        f"algorithm.seed={SEED}",
        "algorithm.off_policy_old_log_probs=tip-free",
        "algorithm.mode_per=group",
        "algorithm.return_tolerance=0",
        "algorithm.learning_rate=3e-4",  # so that the versions can be told apart
        "algorithm.kl_coefficient=0.01",
        "algorithm.kl_rows=with-tips",
        f"algorithm.tasks_per_step={PER_STEP}",
        f"algorithm.rollouts_per_task={GROUP}",
        "verl.agentlightning.async_rollout.enabled=true",
        f"verl.agentlightning.async_rollout.async_train_batch_size={AT_ONCE}",
        f"verl.agentlightning.hooks={Path(__file__).with_name('stack_hooks.py')}",
    ]
    command = ["train", "--profile", "cpu", "run.resume=auto", *arguments]
    recorded = str(directory / "recorded")
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*CLI, *command], cwd=directory, env=environment(RECORDED=recorded), **pipes) as first:
        until(lambda: first.poll() is not None or (run / "metrics.jsonl").exists(), 3000)
        if first.poll() is None:
            (directory / "listening").write_text(json.dumps(listening(psutil.Process(first.pid))))
        first.send_signal(signal.SIGTERM)  # the second step has begun
        said = first.communicate()
    assert first.returncode == 128 + signal.SIGTERM, said
    assert "SIGTERM: the step is finished and a checkpoint saved; a second signal ends at once" in said[0]
    assert "step 2/3" in said[0] and "step 3/3" not in said[0]
    resumes = "empo2: SIGTERM ended the run; the same command with run.name=test run.resume=auto continues after step 2"
    assert said[1].splitlines()[-1] == resumes
    resumed = empo2(directory, *command, RECORDED=recorded).stdout
    assert "resume after step 2, with the memory of that step" in resumed and "step 3/3" in resumed
    return run


def recorded(run: Path) -> list[dict[str, Any]]:
    """The training rollouts that ended well."""
    lines = map(json.loads, (run.parent.parent / "recorded").read_text().splitlines())
    # agent-lightning calls the hook once in each step in which a rollout's group is not complete.
    return list({line["rollout"]: line for line in lines if line["tag"] is not None}.values())


def test_every_step_trains_whole_groups_and_counts_what_is_stale(run: Path) -> None:
    steps = metrics_of(run)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["training/async/n_completed_rollouts"] for line in steps] == [PER_STEP * GROUP] * 3
    assert [line["training/async/n_new_carry_over_rollouts"] for line in steps] == [(AT_ONCE - PER_STEP) * GROUP] * 3
    assert all(line["empo2/rollouts_dropped"] == line["empo2/turns_dropped"] == 0 for line in steps)
    assert steps[0]["empo2/staleness_mean"] == 0
    assert sum(line["empo2/staleness_mean"] for line in steps) > 0
    assert sum(line["empo2/reflections_failed"] for line in steps) == 0
    assert sum(line["empo2/tips_written"] for line in steps) > 0
    assert abs(steps[0]["empo2/with_tips/start_kl"]) < 1e-6  # without a reference it is above 1
    assert "val/return" in steps[-1]  # the rollouts that still ran at the end did not hold it up


def test_on_one_machine_everything_listens_on_loopback(run: Path) -> None:
    """The rows of SECURITY.md: the gateway, Ray, vLLM's servers, and torch's store and gloo of the workers."""
    found = json.loads((run.parent.parent / "listening").read_text())
    for name in ("python", "gcs_server", "raylet", "ray::vLLMHttp", "ray::WorkerDict"):
        assert [each for each, _ in found if each.startswith(name)], name
    addresses = {address.removeprefix("::ffff:") for _, address in found}
    assert not [each for each in addresses if each != "::1" and not each.startswith("127.")], found


def test_no_rollout_and_no_group_mixes_modes(run: Path) -> None:
    """Ten groups were issued, of ten tasks: six in the first two steps, four after the resume."""
    modes = defaultdict(set)
    for line in recorded(run):
        modes[line["task"]].add((line["tag"]["rollout_mode"], line["tag"]["update_mode"]))
    assert all(len(of_group) == 1 for of_group in modes.values())
    assert len(set.union(*modes.values())) > 1
    assert max(line["empo2/off_policy_rows"] for line in metrics_of(run)) > 0


def log_probs(model: Any, prompt: list[int], reply: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)[torch.arange(len(reply)), torch.tensor(reply)]


def test_each_call_was_sampled_by_the_version_that_it_names(run: Path) -> None:
    """vLLM's log-probs are those of its version's weights, and of no other's, in rollouts of several versions too."""
    rollouts = recorded(run)
    several = [line for line in rollouts if len({call["version"] for call in line["calls"]}) > 1]
    assert several
    calls = [call for line in [*several[:2], *rollouts[:2], *rollouts[-2:]] for call in line["calls"]]
    gaps: dict[int, list[float]] = {}
    computed = getattr(torch, fast_dtype())  # as vLLM does: rounded weights differ more than a bound could allow
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=computed)
    versions = sorted({call["version"] for call in calls})
    for version in versions:
        if version:
            model.load_state_dict(weights_of(run, version))
        gaps[version] = [
            float((log_probs(model, call["prompt"], call["reply"]) - torch.tensor(call["log_probs"])).abs().mean())
            for call in calls
        ]
    for sampled in versions:
        own = [number for number, call in enumerate(calls) if call["version"] == sampled]
        means = {version: sum(gaps[version][number] for number in own) / len(own) for version in versions}
        assert means[sampled] < 0.1  # nats
        assert all(means[sampled] < mean / 2 for version, mean in means.items() if version != sampled), means


def test_each_rollout_is_a_trace_from_its_agent_to_its_update(run: Path, receiver: OtlpReceiver) -> None:
    """A training through the launcher sends them: verl's vLLM has its span below the call, the update is the last."""
    traces = defaultdict(list)
    for span in receiver.spans:
        traces[span.trace].append(span)
    kept = [row["rollout"] for file in rollout_files(run / "rollouts") for row in pq.read_table(file).to_pylist()]
    trained = [line for line in recorded(run) if line["rollout"] in kept]  # not one that was alone at the run's end
    assert trained
    for line in trained:
        of = defaultdict(list)
        for span in traces[line["rollout"]]:
            of[span.attributes.get("gen_ai.operation.name") or span.name].append(span)
        (root,), calls, (update,), (create,) = of["invoke_agent"], of["chat"], of["update"], of["create_memory"]
        assert [call.parent for call in calls] == [root.id] * len(line["calls"]) and create.parent == root.id
        served = Counter(span.parent for span in of["llm_request"])
        assert {call.id for call in calls} <= set(served) and set(served.values()) == {1}
        mode = {"empo2.rollout_mode": line["tag"]["rollout_mode"], "empo2.update_mode": line["tag"]["update_mode"]}
        assert all(span.attributes.items() >= mode.items() for span in (root, *calls, update))
        assert update.start >= root.end and "empo2.advantage" in update.attributes
        score = root.events["gen_ai.evaluation.result"]["gen_ai.evaluation.score.value"]
        assert score == pytest.approx(update.attributes["empo2.return"])
        assert bool(of["search_memory"]) == (mode["empo2.rollout_mode"] == "memory")
