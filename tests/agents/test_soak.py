"""ScienceWorld for long and many at once: what 200 episodes cost, and what they leave behind."""

import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from empo2.agents.scienceworld.environment import Environment
from empo2.agents.scienceworld.tasks import TASKS

pytestmark = pytest.mark.stack

MB = 2**20
JVMS, AT_ONCE, EPISODES = 4, 2, 50


def left() -> tuple[int, int, int]:
    """Child processes, threads and open files of this process."""
    return len(psutil.Process().children(recursive=True)), threading.active_count(), psutil.Process().num_fds()


def nothing_more_than(before: tuple[int, int, int]) -> bool:
    """Whether no more is left than before, at once or when py4j has let go of its sockets."""
    for _ in range(300):
        gc.collect()
        if all(now <= then for now, then in zip(left(), before, strict=True)):
            return True
        time.sleep(0.1)
    return False


def java_of(environment: Environment) -> psutil.Process:
    return psutil.Process(environment._simulator._gateway.java_process.pid)


def play(number: int) -> int:
    """50 episodes of one action each, over all tasks, in one Java; its memory at the end, in bytes."""
    worlds = itertools.islice(itertools.cycle(TASKS), number * EPISODES, (number + 1) * EPISODES)
    with Environment() as environment:
        for variation, task in enumerate(worlds):
            environment.reset(task, variation % 5, "easy", 1)
            assert environment.step("look around").done
        return java_of(environment).memory_info().rss


@pytest.mark.timeout(900)  # a minute of two cores' time, of which a busy machine may give little
def test_200_episodes_leave_nothing_and_stay_small():
    with Environment() as environment:  # what is loaded once
        environment.reset("boil", 0, "easy", 1)
    before, memory = left(), psutil.Process().memory_info().rss
    with ThreadPoolExecutor(AT_ONCE) as pool:
        javas = list(pool.map(play, range(JVMS)))
    assert nothing_more_than(before)
    assert psutil.Process().memory_info().rss - memory < 50 * MB
    assert max(javas) < 450 * MB


def test_more_javas_than_cores_start_at_once():
    started = threading.Barrier(6)

    def start(number: int) -> str:
        with Environment() as environment:
            started.wait(120)  # all are alive together
            return environment.reset("boil", 0, "easy", 1).observation

    before = left()
    with ThreadPoolExecutor(started.parties) as pool:
        assert len(set(pool.map(start, range(started.parties)))) == 1
    assert nothing_more_than(before)
