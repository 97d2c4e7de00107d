"""Start agents by forking a process that has imported their class; if it cannot be, in a Python of their own."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from typing import Any

_SERVER = "from empo2.recipe.controller.fork_server import main; main()"
_AGENT = "import sys; from empo2.recipe.controller.agent_process import play; sys.exit(play(sys.argv[1]))"


class WarmAgents:
    """A process that has imported an agent's class, and starts agents by forking itself.

    Args:
        agent_class: ``module:Class``, as agent-lightning writes it.
    """

    def __init__(self, agent_class: str) -> None:
        self._agent_class = agent_class
        control, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(  # ends when this process does, which closes `control`
                [sys.executable, "-c", _SERVER, agent_class, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._control: socket.socket | None = control

    async def start(self, *command: str, env: dict[str, str], **options: Any) -> "Process | ForkedAgent":
        """Start an agent; takes what agent-lightning gives to ``asyncio.create_subprocess_exec``.

        A forked agent has its own session, ``env`` alone as its environment, and this process's output.
        """
        if command[-1] == self._agent_class and self._control is not None:
            try:
                return await _fork(self._control, env)
            except _NotForked as reason:
                print(f"empo2: every agent starts a Python of its own, which takes seconds: {reason}", file=sys.stderr)
                self._control.close()
                self._control = None
        return await asyncio.create_subprocess_exec(sys.executable, "-c", _AGENT, command[-1], env=env, **options)


class ForkedAgent:
    """A forked agent; it has what agent-lightning uses of ``asyncio.subprocess.Process``.

    Attributes:
        pid: process, session and process group.
        returncode: None while it runs; negative after a signal.
    """

    def __init__(self, pid: int, connection: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.create_task(self._wait_for_code(connection, writer))

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
        await asyncio.wait([self._ended])
        return self._ended.result()

    async def _wait_for_code(self, connection: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        code = await connection.readline()
        writer.close()
        if not code:  # the process that would reap it has ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.returncode = int(code or -signal.SIGKILL)
        return self.returncode


class _NotForked(Exception):
    """The agent cannot be forked; the message says why."""


async def _fork(control: socket.socket, env: dict[str, str]) -> ForkedAgent:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise _NotForked("the process that forks them has ended") from None
    connection, writer = await asyncio.open_connection(sock=ours)
    writer.write(json.dumps(env).encode())
    writer.write_eof()
    answer: dict[str, Any]
    try:
        answer = json.loads(await connection.readline() or '{"refused": "the process that forks them has ended"}')
    except OSError:
        answer = {"refused": "the process that forks them has ended"}
    if "refused" in answer:
        writer.close()
        raise _NotForked(answer["refused"])
    return ForkedAgent(answer["pid"], connection, writer)
