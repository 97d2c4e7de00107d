"""Runs a command, and ends its whole process tree when it ends or when the guard's owner does, however that is killed.

A script: ``python process_guard.py SCRATCH COMMAND...``. The owner holds the other end of its standard input; when
that closes, the owner is gone, and SCRATCH, a folder of the owner's, is removed. The guard should have a session of its
own, so that a signal to the owner's process group spares it. Exit code: the command's; 128 + n after signal n; 126
when it cannot be run. Linux only.
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

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.01


def guard(scratch: str, command: list[str]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]!r} cannot be run: {error.strerror}", file=sys.stderr)
        return 126
    ended, owner = os.pidfd_open(process.pid), sys.stdin.fileno()
    ready, _, _ = select.select([ended, owner], [], [])
    if ended not in ready:
        _end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
        return 1
    code = process.wait()
    _end_descendants()
    return code if code >= 0 else 128 - code


def _end_descendants() -> None:
    # Orphans become the subreaper's own children: with no child left, no descendant is.
    while True:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(_POLL_SECONDS)
        except ChildProcessError:
            return


def _descendants() -> list[int]:
    children = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                after_name = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2]
                children[int(after_name.split()[1])].append(int(entry))
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return found[1:]


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1], sys.argv[2:]))
