"""The real stack: the small model adapts to a house, is killed in the middle of a trial, and goes on."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from empo2.recipe.evaluation.adaptation import TASKS, memory_of
from empo2.recipe.evaluation.episode_results import Result, read_results
from empo2.recipe.run_folder import read_lines

from .processes import mark, marked, until  # noqa: F401

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

TASKS_PLAYED, ROLLOUTS, TRIALS = 2, 2, 2


def adapt(folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    words = ["adapt", "smollm2-135m-notes", "--profile", "cpu", "--panel", "coin-medium", "--seeds", "1"]
    words += ["--limit", str(TASKS_PLAYED), "--rollouts", str(ROLLOUTS), "--trials", str(TRIALS), "--output", "out"]
    command = [sys.executable, "-m", "empo2.recipe.cli", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def part(trial: int) -> str:
    return f"seed 0, trial {trial}, {TASKS}"


def of_trial(trial: int, results: list[Result]) -> list[Result]:
    return [each for each in results if each.part == part(trial)]


def test_adaptation_goes_on_after_a_kill(tmp_path: Path, mark: str) -> None:  # noqa: F811
    out, environment = tmp_path / "out", {**os.environ, "EMPO2_TEST_MARK": mark}
    first = adapt(tmp_path, environment)
    file = out / "results.jsonl"
    until(lambda: len(read_lines(file)) > TASKS_PLAYED * ROLLOUTS or first.poll() is not None, 600)
    assert first.poll() is None, first.communicate()[0]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    until(lambda: not marked(mark), 60)
    kept = of_trial(0, read_results(out))
    assert memory_of(out, 0)[0] == 0  # trial 1 had begun

    second = adapt(tmp_path, environment)
    said = second.communicate(timeout=600)[0]
    assert second.returncode == 0, said
    results = read_results(out)
    assert Counter(each.key for each in results) == {
        (part(trial), index, sample): 1
        for trial in range(TRIALS + 1)
        for index in range(TASKS_PLAYED)
        for sample in range(ROLLOUTS)
    }
    assert {each.failed for each in results} == {None}
    assert of_trial(0, results) == kept  # not played again
    assert {each.calls_with_tips for each in kept} == {0}
    assert all(each.calls_with_tips for each in of_trial(TRIALS, results))
    trial, bank = memory_of(out, 0)
    assert trial == TRIALS and bank is not None
    with closing(sqlite3.connect(bank)) as database:
        plays = database.execute("SELECT count(*) FROM plays").fetchone()[0]
        written = database.execute("SELECT count(*) FROM tips").fetchone()[0]
    assert plays == TASKS_PLAYED * ROLLOUTS * TRIALS  # what the trial that was killed had read and written is forgotten
    assert 0 < written <= len(results)
