"""Processes that tests start: a mark in their environment tells them apart, and none may be left."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

# A daemon, as Ray's: forks twice, has a session of its own, ignores signals. Writes its pid to the first argument.
DAEMON = """
import os, signal, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        with open(sys.argv[1] + ".tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".tmp", sys.argv[1])
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait for what is sure to come: the limit only ends a test that would wait for ever."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("EMPO2_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@contextmanager
def marking() -> Iterator[str]:
    """Yield the value of EMPO2_TEST_MARK for all that is started; nothing with it may be left at the end."""
    mark = uuid.uuid4().hex
    try:
        yield mark
        until(lambda: not marked(mark))
    finally:
        for process in marked(mark):
            process.kill()


@pytest.fixture
def mark() -> Iterator[str]:
    with marking() as mark:
        yield mark
