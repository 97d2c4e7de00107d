"""The guard: what it reports of its command, how it passes on an end, and that nothing outlives it or its owner."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from empo2.agents.process_guard import guarded

from ..processes import DAEMON, mark, until

__all__ = ["mark"]

type Start = Callable[..., subprocess.Popen[bytes]]

# With os.write, since the signal may come while the first line is being written, and print is not reentrant.
SAY_BYE = """
import os, signal, sys, time
def end(*_):
    os.write(1, b"bye\\n")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
os.write(1, b"up\\n")
time.sleep(1000)
"""


@pytest.fixture
def start(mark: str) -> Iterator[Start]:
    started = []

    def start_one(code: str, *arguments: str, grace: float = 0, **options) -> subprocess.Popen:
        process = subprocess.Popen(
            guarded([sys.executable, "-c", code, *arguments], grace=grace),
            env={**os.environ, "EMPO2_TEST_MARK": mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        with process:  # closes its pipes, which ends it
            pass


def hear(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdout and process.stdout.readline() == line + b"\n"


@pytest.mark.parametrize(("code", "ended"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_commands(start: Start, code: str, ended: int) -> None:
    assert start(code).wait(30) == ended


def test_a_command_that_cannot_be_run() -> None:
    done = subprocess.run(guarded(["/no/such/program"]), stdin=subprocess.PIPE, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (126, "'/no/such/program' cannot be run: No such file or directory\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, None])
def test_a_command_may_finish_after_a_signal_to_its_guard_or_its_owners_end(start: Start, number: int | None) -> None:
    guard = start(SAY_BYE, grace=60)
    hear(guard, b"up")
    if number is None:
        assert guard.stdin
        guard.stdin.close()
    else:
        for _ in range(3):  # further signals do not shorten the grace time
            guard.send_signal(number)
            time.sleep(0.02)
    hear(guard, b"bye")
    assert guard.wait(30) == 3


def test_a_command_that_does_not_listen_is_killed_after_the_grace_time(start: Start) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"
    guard = start(deaf, grace=0.5)
    hear(guard, b"up")
    started = time.monotonic()
    guard.terminate()
    assert guard.wait(30) == 128 + signal.SIGKILL
    assert 0.5 <= time.monotonic() - started < 60


OWNER = """
import subprocess, sys, time
from empo2.agents.process_guard import guarded
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
subprocess.Popen(guarded(command, scratch=sys.argv[3]), stdin=subprocess.PIPE, start_new_session=True)
time.sleep(1000)
"""


def test_a_guard_whose_owner_is_killed_by_another_guard_cleans_up(start: Start, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    code = DAEMON + "time.sleep(1000)"
    outer = start(OWNER, code, str(tmp_path / "pid"), str(tmp_path / "scratch"))
    until((tmp_path / "pid").exists)
    outer.terminate()
    outer.wait(30)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "scratch").exists()


def test_the_command_inherits_what_the_guard_was_given_and_nothing_else(start: Start) -> None:
    code = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd') if fd != '3'), os.read(0, 1))"
    with socket.socket() as listener:
        inherited = fcntl.fcntl(listener, fcntl.F_DUPFD, 100)  # 3 is what the command lists its descriptors with
        guard = start(code, pass_fds=(inherited,))
        hear(guard, f"[0, 1, 2, {inherited}] b''".encode())
        os.close(inherited)


def test_another_users_processes_hold_no_guard_up(start: Start) -> None:
    """As those of sudo; here `os.kill` refuses one process."""
    code = """
import os, subprocess, sys
from empo2.agents import process_guard

process_guard._NESTED_GUARD_SECONDS = 0.3
process_guard.adopt_orphans()
others, mine = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
kill = os.kill
def refuse(pid, number):
    if pid == others.pid:
        raise PermissionError
    kill(pid, number)
os.kill = refuse
process_guard.end_descendants()
kill(others.pid, 0)
print(mine.wait(), flush=True)
"""
    process = start(code)
    hear(process, b"0")  # reaped already
    assert process.wait(20) == 0


def test_orphans_are_reaped_while_the_command_runs(start: Start) -> None:
    orphan = "import os\nif not os.fork():\n    os.fork()\n    os._exit(0)\nos.wait()\n"
    guard = start(orphan * 20 + "print('up', flush=True)\nimport time\ntime.sleep(1000)", grace=5)
    hear(guard, b"up")
    until(lambda: len(psutil.Process(guard.pid).children()) == 1)
    guard.terminate()
