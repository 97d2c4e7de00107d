"""The agent as a process of its own: run as agent-lightning's controller runs it, failed, and killed.

Every process started here, Java included, inherits a mark in its environment: none may outlive the agent.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from ..processes import mark

__all__ = ["mark"]

pytestmark = pytest.mark.stack

# agentlightning.controller.local_reconciler.LocalReconciler._spawn_for, 1.0.2
CONTROLLER = [
    sys.executable,
    "-c",
    "import sys; from agentlightning.controller.local_reconciler import _run_local_reconciler_worker; "
    "sys.exit(_run_local_reconciler_worker(sys.argv[1]))",
    "empo2.agents.scienceworld.agent:ScienceWorldAgent",
]


@pytest.fixture
def start(mark: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start_one(command: list[str], **environ: str) -> subprocess.Popen[str]:
        environ = {**os.environ, **environ, "EMPO2_TEST_MARK": mark}
        process = subprocess.Popen(
            command, env=environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_agent_leaves_no_java(start, server, episode, variables, stop):
    asked, release = threading.Event(), threading.Event()

    def reply(messages: list[dict]) -> str:
        asked.set()
        release.wait(250)
        return "look around"

    server.reply = reply
    agent = start(CONTROLLER, **variables(episode()), **server.variables)
    assert asked.wait(250)
    (java,) = psutil.Process(agent.pid).children()
    assert java.name() == "java"
    agent.send_signal(stop)
    agent.communicate(timeout=250)
    release.set()
    java.wait(250)
    assert server.events == []


def test_a_wrong_setting_fails_the_rollout_with_one_clear_line(start, server, episode, variables):
    agent = start(CONTROLLER, **variables(episode()), **server.variables, JAVA_TOOL_OPTIONS="-Xnonsense")
    _, errors = agent.communicate(timeout=250)
    assert agent.returncode == 1
    says = "RuntimeError: .*java did not start with JAVA_TOOL_OPTIONS='-Xnonsense'"
    assert re.match(says, errors.strip().splitlines()[-1])
    assert "Exception ignored" not in errors
    assert server.events == []
