"""The real stack: the small model adapts to a house, is killed in the middle of a trial, and goes on."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from empo2.recipe.evaluation.adaptation import TASKS, bank_of
from empo2.recipe.evaluation.results import Result, read_results

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


def by_trial(results: list[Result]) -> dict[str, list[Result]]:
    return {part: [each for each in results if each.part == part] for part in dict.fromkeys(r.part for r in results)}


def test_adaptation_goes_on_after_a_kill(tmp_path: Path, mark: str) -> None:  # noqa: F811
    out, environment = tmp_path / "out", {**os.environ, "EMPO2_TEST_MARK": mark}
    first = adapt(tmp_path, environment)
    file = out / "results.jsonl"
    deadline = time.monotonic() + 600
    while not (file.exists() and len(file.read_text().splitlines()) > TASKS_PLAYED * ROLLOUTS):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0]
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    until(lambda: not marked(mark), 60)
    kept = by_trial(read_results(out))
    assert bank_of(out, 0)[0] == 0  # trial 1 had begun

    second = adapt(tmp_path, environment)
    said = second.communicate(timeout=600)[0]
    assert second.returncode == 0, said
    results = read_results(out)
    assert Counter(each.key for each in results) == {
        (f"seed 0, trial {trial}, {TASKS}", index, sample): 1
        for trial in range(TRIALS + 1)
        for index in range(TASKS_PLAYED)
        for sample in range(ROLLOUTS)
    }
    assert {each.failed for each in results} == {None}
    trials = by_trial(results)
    zero, *later = [trials[f"seed 0, trial {trial}, {TASKS}"] for trial in range(TRIALS + 1)]
    assert zero == kept[f"seed 0, trial 0, {TASKS}"]  # not played again
    assert {each.calls_with_tips for each in zero} == {0}
    assert all(each.calls_with_tips for each in later[-1])
    trial, bank = bank_of(out, 0)
    assert trial == TRIALS and bank is not None
    with closing(sqlite3.connect(bank)) as database:
        plays = database.execute("SELECT count(*) FROM plays").fetchone()[0]
        written = database.execute("SELECT count(*) FROM tips").fetchone()[0]
    assert plays == TASKS_PLAYED * ROLLOUTS * TRIALS  # what the trial that was killed had read and written is forgotten
    assert 0 < written <= len(results)
