"""Start agents by forking a process that has imported their class: Python's fork server."""

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running, read_signed
from multiprocessing.popen_forkserver import Popen
from typing import Any

import psutil

from empo2.agents.process_guard import is_guard
from empo2.recipe.config import TRACES_VARIABLES
from empo2.recipe.protocol import traceparent

AGENT_CLASS = "EMPO2_AGENT_CLASS"  # what the fork server imports, ``module:Class``
_ADDRESS = "AGL_OPENAI_BASE_URL"  # has the rollout in it


def start_fork_server(agent_class: str) -> None:
    """Start the process that imports an agent's class; it ends when this process does.

    multiprocessing has one for each process, and starts it again if it has ended.
    """
    os.environ[AGENT_CLASS] = agent_class
    multiprocessing.set_forkserver_preload([__name__, "empo2.recipe.controller.forked_agent"])
    ensure_running()


async def start_agent(*command: str, env: dict[str, str], **_: Any) -> "WarmAgent":
    """Start an agent as a fork; takes what agent-lightning gives to ``asyncio.create_subprocess_exec``.

    The agent has its own session, ``env`` alone as its environment, and this process's output. Where traces are on, it
    finds the parent of its spans in TRACEPARENT.
    """
    rollout = re.search(r"/proxy/rollout/([^/]+)/", env.get(_ADDRESS, ""))
    if rollout and is_traced():
        env = {**env, "TRACEPARENT": traceparent(rollout[1])}
    # Process.start would read the exit codes of the agents that have just ended, and keep them from WarmAgent.
    process = ForkServerProcess(target=_run, args=(command[-1], env))
    popen = await asyncio.to_thread(Popen, process)  # the first waits for the import
    return WarmAgent(popen, env.get(_ADDRESS, ""))


def is_traced() -> bool:
    """Return whether this process's environment names a collector of spans."""
    return any(os.environ.get(name) for name in TRACES_VARIABLES)


class WarmAgent:
    """A running agent; it has what agent-lightning uses of ``asyncio.subprocess.Process``.

    Attributes:
        pid: process, session and process group.
        returncode: None while it runs; negative after a signal.
    """

    def __init__(self, process: Popen, address: str) -> None:
        self.pid = process.pid
        self.returncode: int | None = None
        self._process, self._address = process, address
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._end)

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        try:
            self.returncode = read_signed(self._process.sentinel)
        except EOFError:  # the fork server has ended, which would tell the code
            with contextlib.suppress(ProcessLookupError):  # it may have no session yet
                os.kill(self.pid, signal.SIGKILL)
            self.returncode = -signal.SIGKILL
        self._process.close()  # its descriptors: agent-lightning keeps every agent that it has started
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._address:
            asyncio.get_running_loop().run_in_executor(None, end_left_by, self._address)
        self._ended.set()


def end_left_by(address: str) -> None:
    """Kill what an agent has left in sessions of its own, such as browsers: what has its rollout's address.

    Guards are left, and what they guard: they end it themselves when their owner has ended.
    """
    left = []
    for pid in psutil.pids():  # `process_iter` is not for several threads
        with contextlib.suppress(psutil.Error, OSError):
            if (process := psutil.Process(pid)).environ().get(_ADDRESS) == address:
                left.append(process)
    guards = {process for process in left if is_guard(process.pid)}
    for process in left:
        with contextlib.suppress(psutil.Error):
            if guards.isdisjoint([process, *process.parents()]):
                process.kill()


def _run(agent_class: str, environment: dict[str, str]) -> None:
    from empo2.recipe.controller.forked_agent import run_agent  # the fork server has imported it

    run_agent(agent_class, environment)
