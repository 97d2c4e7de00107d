"""Sweeps: what a file says, in which order its runs are trained, what is repeated, and what a failure does."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.plan import ABLATIONS, ablation, read_plan
from empo2.recipe.files.run_directory import write_settings
from empo2.recipe.launcher.sweep import check_settings, has_ended, train, train_all

from ..processes import mark, marked

__all__ = ["mark"]


def write(folder: Path, content: dict | str, name: str = "lr.yaml") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return file


ARMS = """
seeds: 2
settings: {run: {steps: 3}, algorithm: {mask_threshold: 0.1}}
arms:
  grpo: {settings: {algorithm: {name: grpo}}, seeds: 1}
  bare: {title: no mask, ablation: no-mask, settings: {algorithm: {clip_low: 0.1}}}
grid: {algorithm.learning_rate: [0.1, 0.2], memory.scope: [[], [task]]}
"""


def test_arms_grid_and_seeds(tmp_path: Path):
    file = write(tmp_path, ARMS)
    folder, trials = read_plan(file, profile="cpu", overrides=["run.directory=elsewhere", "algorithm.clip_high=0.5"])
    assert folder == Path("elsewhere/lr")
    assert [trial.seed for trial in trials] == [1] * 8 + [2] * 4
    first = "grpo-learning_rate-0.1-scope"
    assert [trial.name for trial in trials[:2]] == [f"{first}-1", f"{first}-task-1"]
    last = trials[-1]
    assert last.name == "bare-learning_rate-0.2-scope-task-2"
    assert last.title == "no mask, learning_rate=0.2, scope=['task']"
    algorithm = last.settings.algorithm
    assert (algorithm.name, algorithm.seed, algorithm.learning_rate) == ("empo2", 2, 0.2)
    assert (algorithm.mask_threshold, algorithm.clip_low, algorithm.clip_high) == (0, 0.1, 0.5)
    assert last.settings.memory.scope == ["task"] and last.settings.hardware.device == "cpu"
    run = last.settings.run
    assert (run.name, run.directory, run.resume, run.steps) == (last.name, "elsewhere/lr", "auto", 3)
    folder, (trial,) = read_plan(write(tmp_path, {"grid": {"algorithm.learning_rate": [0.1]}}), tmp_path / "here")
    assert (folder, trial.name, trial.title) == (tmp_path / "here", "learning_rate-0.1-1", "learning_rate=0.1")
    assert [trial.name for trial in read_plan(write(tmp_path, {}))[1]] == ["lr-1"]
    assert [trial.name for trial in read_plan(write(tmp_path, {}, "my sweep.yaml"))[1]] == ["my-sweep-1"]
    two = {"grid": {"model.temperature": [0.5], "reflection.temperature": [0.5, 1.0]}}
    names = [trial.name for trial in read_plan(write(tmp_path, two))[1]]
    assert names == [f"model.temperature-0.5-reflection.temperature-{value}-1" for value in (0.5, 1.0)]


def test_files_of_tasks_are_found_by_the_process_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its settings from another folder; and a run that goes on has what it began with."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"tasks": {"source": "mine.jsonl", "args": {"validation": "val.jsonl"}}}, "mine.yaml")
    sweeps = [
        read_plan(write(tmp_path, {"settings": {"tasks": {"source": "mine.jsonl"}}}), tmp_path, profile="cpu")[1],
        read_plan(write(tmp_path, {}), tmp_path, profile="cpu", config=Path("mine.yaml"))[1],
        read_plan(write(tmp_path, {}), tmp_path, profile="cpu", overrides=["tasks.source=mine.jsonl"])[1],
    ]
    for (trial,) in sweeps:
        assert trial.settings.tasks.source == str(tmp_path / "mine.jsonl")
        (tmp_path / trial.name).mkdir(exist_ok=True)
        write_settings(trial.settings, tmp_path / trial.name)
        check_settings([trial], tmp_path)
    assert sweeps[1][0].settings.tasks.args == {"validation": str(tmp_path / "val.jsonl")}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"sets": {}}, ["lr.yaml: sets={}", "a sweep has seeds, settings, arms"]),
        ({"arms": {"a b": {}}}, ["a b", "string should match pattern"]),
        ({"arms": {"a": {"ablation": "no-musk"}}}, ["'no-musk'", "did you mean no-mask?"]),
        ({"arms": {"a": {"settings": {"algorithm": {"sed": 1}}}}}, ["arm a", "algorithm.sed", "algorithm.seed?"]),
        ({"arms": {"a": {}}, "grid": {"memory.scope": [["task", "x"], "task-x"]}}, ["arm a-scope-task-x", "list"]),
        ({"arms": {"-x": {}}}, ["arms.-x", "pattern"]),
        ({"settings": {"algorithm": {"seed": 7}}}, ["algorithm.seed", "from 1 on", "`seeds`"]),
        ({"grid": {"algorithm.seed": [7, 8]}}, ["algorithm.seed", "from 1 on", "`seeds`"]),
        ({"arms": {"a": {"settings": {"algorithm": None}}}}, ["arm a", "algorithm=None: is a section"]),
        ({"arms": {"a": {}, "b": {"title": "a"}}}, ["arms a and b have the title 'a'"]),
        ({"grid": {"model.path": ["a/b", "a-b"]}}, ["path-a-b-1 is the name of two runs"]),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, content: dict, words: list[str]):
    with pytest.raises(ConfigError) as error:
        read_plan(write(tmp_path, content))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_seed_for_all_runs_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"algorithm\.seed: runs have their own, from 1 on"):
        read_plan(write(tmp_path, {"seeds": 2}), overrides=["algorithm.seed=7"])


def test_an_ablation_changes_its_part_alone_and_arms_differ():
    for file in ABLATIONS.parent.glob("*.yaml"):
        _, trials = read_plan(file, profile="gpu")
        first = [trial.settings.to_dict() | {"run": None} for trial in trials if trial.seed == 1]
        assert len(first) > 3 and all(first.count(each) == 1 for each in first), file
    paper = load_settings("gpu").to_dict()
    changed: dict[str, list[str]] = {}
    for name in yaml.safe_load(ABLATIONS.read_text())["arms"]:
        own = load_settings("gpu", layer=ablation(name)).to_dict()
        keys = [(section, key) for section in own for key in own[section]]
        changed[name] = [f"{section}.{key}" for section, key in keys if own[section][key] != paper[section][key]]
    assert changed == {
        "empo2": [],
        "no-mask": ["algorithm.mask_threshold"],
        "no-intrinsic": ["algorithm.intrinsic_coefficient"],
        "rnd": ["algorithm.novelty"],
        "on-policy": ["algorithm.off_policy_probability"],
        "off-policy-only": ["algorithm.off_policy_probability"],
        "no-memory": ["algorithm.name"],
        "tip-free": ["algorithm.off_policy_old_log_probs"],
    }


# Trains as `empo2 train` does, as far as a sweep sees it: it continues after the steps that are in metrics.jsonl.
TRAINER = """
import json, sys, time, yaml
from pathlib import Path
settings = yaml.safe_load(open(sys.argv[1]))
run = settings["run"]
folder = Path(run["directory"], run["name"])
folder.mkdir(exist_ok=True)
metrics = folder / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
print("begins after", done)
for step in range(done + 1, run["steps"] + 1):
    while (folder.parent / "slow").exists() and step == 3:
        time.sleep(0.1)
    if (folder.parent / "broken").exists() and step == 2 and run["name"].startswith("b-"):
        print("empo2: error: out of luck")
        raise SystemExit(1)
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step, "val/return": float(step), "seed": settings["algorithm"]["seed"]}) + "\\n")
"""


def command(file: int) -> list[str]:
    return [sys.executable, "-c", TRAINER, f"/dev/fd/{file}"]


def sweep(file: Path, folder: Path, interrupted_at: str = "never") -> list[str]:
    said: list[str] = []

    def show(text: str) -> None:
        said.append(text)
        if interrupted_at in text:
            raise KeyboardInterrupt

    _, trials = read_plan(file, folder, profile="cpu")
    failed = train_all(trials, folder, show, command)
    return [*said, f"failed {failed}"]


def steps(folder: Path, name: str) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_neither_a_failed_run_nor_an_interruption_loses_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
):
    monkeypatch.setenv("EMPO2_TEST_MARK", mark)
    file = write(tmp_path, {"settings": {"run": {"steps": 3}}, "arms": {"b": {}, "a": {"seeds": 2}}})
    (tmp_path / "broken").touch()
    said = sweep(file, tmp_path)
    assert said[-1] == "failed {'b-1': 'b-1 ended with exit code 1: out of luck'}"
    assert "run 1 of 3  b-1  failed: b-1 ended with exit code 1: out of luck" in said
    assert "run 3 of 3  a-2  step 3/3  validation 3.00" in said
    assert (steps(tmp_path, "b-1"), steps(tmp_path, "a-1"), steps(tmp_path, "a-2")) == ([1], [1, 2, 3], [1, 2, 3])

    (tmp_path / "broken").unlink()
    (tmp_path / "slow").touch()
    with pytest.raises(KeyboardInterrupt):
        sweep(file, tmp_path, interrupted_at="step 2/3")
    assert not marked(mark)
    (tmp_path / "slow").unlink()
    said = sweep(file, tmp_path)
    assert [line for line in said if "before" in line] == [
        f"run {number} of 3  {name}  has ended before" for number, name in ((2, "a-1"), (3, "a-2"))
    ]
    assert said[-1] == "failed {}" and steps(tmp_path, "b-1") == [1, 2, 3]
    assert (tmp_path / "b-1.log").read_text().splitlines()[-1] == "begins after 2"


def test_the_process_of_a_training_can_be_looked_at(tmp_path: Path):
    _, (trial,) = read_plan(write(tmp_path, {"settings": {"run": {"steps": 3}}}), tmp_path, profile="cpu")
    looks: list[tuple[int, int | None]] = []
    train(trial, tmp_path, print, command, lambda process, step: looks.append((process, step)))
    assert [step for _, step in looks if step is not None] == [1, 2, 3] and looks[0][1] is None
    assert len({process for process, _ in looks}) == 1


def test_a_training_gets_the_keys_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPO2_KEY", "mine")
    _, (trial,) = read_plan(write(tmp_path, {"settings": {"run": {"steps": 3}}}), tmp_path, profile="cpu")
    told = f"import os; open({str(tmp_path / 'key')!r}, 'w').write(os.environ['EMPO2_KEY'])\n"
    train(trial, tmp_path, print, lambda file: [sys.executable, "-c", told + TRAINER, f"/dev/fd/{file}"])
    assert (tmp_path / "key").read_text() == "mine"


def test_a_run_that_began_with_other_settings_is_refused(tmp_path: Path):
    def trials(*overrides: str):
        return read_plan(write(tmp_path, {"arms": {"a": {}}}), tmp_path, profile="cpu", overrides=overrides)[1]

    (trial,) = trials()
    (tmp_path / "a-1").mkdir()
    check_settings([trial], tmp_path)  # a run that has not begun
    write_settings(trial.settings, tmp_path / "a-1")
    check_settings(trials("run.steps=99", "hardware.kv_cache=1", "agent.concurrency=2"), tmp_path)
    with pytest.raises(ConfigError, match=r"a-1: .* began with algorithm\.clip_low=0\.2, the sweep now has 0\.1; give"):
        check_settings(trials("algorithm.clip_low=0.1"), tmp_path)
    (tmp_path / "a-1" / "metrics.jsonl").write_text('{"step": 6}\n{"st')
    assert has_ended(trial, tmp_path) and not has_ended(trials("run.steps=7")[0], tmp_path)


def test_the_command_reports_all_runs_and_names_those_that_failed(tmp_path: Path, empo2: Any):
    """`empo2 train` itself refuses arm b, whose port is taken; the runs of arm a have ended."""
    agent = "empo2.agents.scienceworld.agent:ScienceWorldAgent"
    (tmp_path / "tasks.jsonl").write_text('{"task": "a"}\n{"task": "b"}\n')
    tasks = {"source": str(tmp_path / "tasks.jsonl")}
    settings = {"run": {"steps": 2}, "agent": {"class": agent}, "tasks": tasks, "memory": {"scope": "all-tasks"}}
    taken = socket.create_server(("127.0.0.1", 0))
    port = {"gateway": {"port": taken.getsockname()[1]}}
    arms = {"a": {"title": "the <b> of arms"}, "b": {"seeds": 1, "settings": port}}
    file = write(tmp_path, {"seeds": 2, "settings": settings, "arms": arms}, "mine.yaml")
    for seed in (1, 2):
        folder = tmp_path / "runs" / "mine" / f"a-{seed}"
        folder.mkdir(parents=True)
        lines = [{"step": step, "val/success_rate": seed * step / 8} for step in range(3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with taken:
        printed, errors = empo2("sweep", str(file), code=1)
    assert errors.splitlines() == ["empo2: error: 1 of 3 runs failed: b-1; try again with this command"]
    assert "run 2 of 3  b-1  failed: " in printed and "gateway.port=" in printed
    row = next(line for line in printed.splitlines() if line.startswith("the <b> of arms"))
    assert row.split()[-3:] == ["2", "2", "37.5"]  # the last values are 25 and 50 %
    assert "the &lt;b&gt; of arms" in (tmp_path / "runs/mine/report.html").read_text()
    assert (tmp_path / "runs/mine/report.html").stat().st_mode & 0o077 == 0
