"""The launcher's processes, with stand-ins: what is said of one that ends, and that none outlives the launcher."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from empo2.recipe.errors import ProcessError
from empo2.recipe.launcher.processes import Processes
from empo2.recipe.launcher.progress import NewMetrics, progress, step_summary

from ..processes import DAEMON, mark, marked, until

__all__ = ["mark"]

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.fixture
def processes(tmp_path: Path, mark: str) -> Iterator[Processes]:
    processes = Processes(tmp_path, {**os.environ, "EMPO2_TEST_MARK": mark})
    yield processes
    processes.stop()


def failure(processes: Processes) -> str:
    errors: list[ProcessError] = []

    def failed() -> bool:
        try:
            processes.check()
        except ProcessError as error:
            errors.append(error)
        return bool(errors)

    until(failed)
    return str(errors[0])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('out of luck'); raise SystemExit(7)", "gateway ended with exit code 7: the end of LOG:\nout of luck"),
        ("", "gateway ended with exit code 0: the end of LOG:\n"),
        ("import os; print('x'); os.abort()", "gateway was ended by SIGABRT: the end of LOG:\nx"),
        ("import os; os.kill(os.getpid(), 9)", "gateway was ended by SIGKILL: the end of LOG:\n"),
        (
            "print('noise'); print('empo2: error: the disk is full'); print('more'); raise SystemExit(1)",
            "gateway ended with exit code 1: the disk is full",
        ),
    ],
)
def test_a_process_that_ends_is_named_with_its_reason(processes: Processes, code: str, says: str) -> None:
    processes.start("controller", SLEEP)
    processes.check()
    processes.start("gateway", [sys.executable, "-c", code])
    assert failure(processes) == says.replace("LOG", str(processes.directory / "gateway.log"))


def test_the_trainer_may_be_done(processes: Processes) -> None:
    processes.start("trainer", [sys.executable, "-c", ""])
    until(lambda: processes.done("trainer"))
    processes.check()


# A launcher: one process that ends when asked, one that leaves a daemon and ignores the question.
LAUNCHER = """
import os, sys, time
from pathlib import Path
from empo2.recipe.launcher.processes import running
directory = Path(sys.argv[1])
try:
    with running(directory, dict(os.environ)) as processes:
        processes.start("gateway", [sys.executable, "-c", "import time; time.sleep(1000)"])
        command = [sys.executable, "-c", sys.argv[2] + "time.sleep(1000)", str(directory / "pid")]
        processes.start("trainer", command)
        while True:
            processes.check()
            time.sleep(0.05)
except KeyboardInterrupt:
    raise SystemExit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_the_launcher(tmp_path: Path, mark: str, number: int) -> None:
    environment = {**os.environ, "EMPO2_TEST_MARK": mark}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), DAEMON], env=environment)
    try:
        until((tmp_path / "pid").exists)
        launcher.send_signal(number)
        assert launcher.wait(30) == (-number if number == signal.SIGKILL else 130)
        until(lambda: not marked(mark), 10)
    finally:
        launcher.kill()
        launcher.wait()


def test_a_run_under_nohup_survives_its_terminal(tmp_path: Path, mark: str) -> None:
    environment = {**os.environ, "EMPO2_TEST_MARK": mark}
    command = ["nohup", sys.executable, "-c", LAUNCHER, str(tmp_path), DAEMON]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as launcher:
        until((tmp_path / "pid").exists)
        launcher.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(1)
        launcher.terminate()
        assert launcher.wait(30) == 130


def test_what_a_killed_guard_leaves_is_ended_too(tmp_path: Path, mark: str) -> None:
    environment = {**os.environ, "EMPO2_TEST_MARK": mark}
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), DAEMON]
    with psutil.Popen(command, env=environment, stderr=subprocess.PIPE) as launcher:
        try:
            until((tmp_path / "pid").exists)
            (guard,) = [child for child in launcher.children() if str(tmp_path / "pid") in child.cmdline()]
            guard.kill()
            assert b"trainer was ended by SIGKILL" in launcher.communicate(timeout=30)[1]
            assert not marked(mark)
        except BaseException:
            launcher.kill()
            raise


def test_metrics_are_read_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    new = NewMetrics(file)
    assert new.read() == []
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert new.read() == [{"step": 1}, {"step": 2}]
    with file.open("a") as stream:
        stream.write('ep": 3}\n')
    assert new.read() == [{"step": 3}]
    assert new.read() == []
    assert NewMetrics(file).read() == []


def test_what_is_shown_of_a_step() -> None:
    metrics = {
        "training/return": -12.5,
        "empo2/memory_fraction": 1.0,
        "empo2/off_policy_fraction": 0.0,
        "empo2/memory_size": 8,
        "timing_s/step": 24.4,
        "empo2/rollouts_dropped": 3,
    }
    assert step_summary(metrics) == "return  -12.50  memory, on-policy   8 tips  24 s  3 rollouts dropped"
    assert step_summary({"val/return": 8.25, "val/success_rate": 0}) == "validation 8.25"
    output = io.StringIO()
    with progress(Console(file=output, width=80), 6) as show:
        show("loading", None)
        show(step_summary(json.loads('{"val/return": 8.25}')), 0)
    assert output.getvalue() == "loading\nstep 0/6  validation 8.25\n"
