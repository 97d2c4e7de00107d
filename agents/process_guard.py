"""Run a command, and end its whole process tree when it ends or when its owner ends, even by SIGKILL.

This is a separate script, started with ``guarded(command)``. The owner holds the other end of its standard input; when
that closes, the owner has ended or wants the command to end. The guard then sends the command SIGTERM, as on a signal
to itself, and kills the rest of the tree after a grace time. SIGUSR1 is passed on. Start it in its own session, so that
signals to the owner's process group do not reach it. Exit code: the command's; 128 + n after signal n; 126 when it
cannot be run.
Linux only.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

CANNOT_RUN = 126
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.01
_NESTED_GUARD_SECONDS = 5
_TOLD_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def guarded(command: list[str], *, grace: float = 0, scratch: str = "") -> list[str]:
    """Return the command line that runs ``command`` under a guard.

    Args:
        command: program and arguments. File descriptors that the guard inherits are passed on; standard input is empty.
        grace: seconds between SIGTERM and SIGKILL.
        scratch: a folder of the owner, removed if the owner ended without removing it.
    """
    return [sys.executable, "-I", "-S", __file__, str(grace), scratch, *command]


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that ``end_descendants`` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let this process be killed when its parent ends, even by SIGKILL; its own children are not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_descendants() -> None:
    """Kill and reap all descendants of this process. Call ``adopt_orphans`` before starting any.

    Guards among them have lost their owners, and get time to end their own trees and to remove their folders. Another
    user's processes are left after this time.
    """
    deadline = time.monotonic() + _NESTED_GUARD_SECONDS
    while True:
        others = False  # another user's, such as root's by sudo: they may not be killed
        is_late = time.monotonic() > deadline
        for pid in _descendants(with_guards=is_late):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                others = True
        # Orphans become children of this process, so no child left means no descendant left.
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                if others and is_late:
                    return
                time.sleep(_POLL_SECONDS)
        except ChildProcessError:
            return


def _descendants(with_guards: bool) -> list[int]:
    """Return the ids of this process's descendants; without guards, the descendants of guards are left out too."""
    children = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                after_name = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2]
                children[int(after_name.split()[1])].append(int(entry))
    found = [os.getpid()]
    for pid in found:
        found += [child for child in children[pid] if with_guards or not is_guard(child)]
    return found[1:]


def is_guard(pid: int) -> bool:
    """Return whether a process is a guard."""
    with contextlib.suppress(OSError):
        return os.fsencode(__file__) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4]
    return False


def _run(command: list[str], grace: float, scratch: str) -> int:
    adopt_orphans()
    signals = _signals_as_a_file()
    try:
        # All inheritable descriptors are meant for the command.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    except OSError as error:
        print(f"{command[0]!r} cannot be run: {error.strerror}", file=sys.stderr, flush=True)
        return CANNOT_RUN
    owner = sys.stdin.fileno()
    watched: list[int] = [signals, owner]
    deadline: float | None = None
    while (code := _reap(process.pid)) is None:
        left = None if deadline is None else max(0, deadline - time.monotonic())
        ready, _, _ = select.select(watched, [], [], left)
        if not ready:
            code = -signal.SIGKILL
            break
        came = {*os.read(signals, 4096)} if signals in ready else set()
        if signal.SIGUSR1 in came:
            _tell(process.pid, signal.SIGUSR1)
        if deadline is None and (not came.isdisjoint(_TOLD_TO_STOP) or owner in ready):
            watched, deadline = [signals], time.monotonic() + grace
            _tell(process.pid, signal.SIGTERM)
    end_descendants()
    if scratch and deadline is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _tell(command: int, number: int) -> None:
    with contextlib.suppress(PermissionError):  # another user's, by sudo
        os.kill(command, number)


def _signals_as_a_file() -> int:
    """Return a descriptor from which the numbers of SIGCHLD and of stop signals can be read, one byte each."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGUSR1, *_TOLD_TO_STOP):
        signal.signal(number, lambda *_: None)
    return reading


def _reap(command: int) -> int | None:
    """Reap all ended children, adopted orphans too; return the command's exit code if it was one of them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


if __name__ == "__main__":
    # At once, since another signal while Python shuts down would change the exit code.
    os._exit(_run(sys.argv[3:], float(sys.argv[1]), sys.argv[2]))
