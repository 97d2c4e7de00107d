"""A process that imports an agent's class once, and forks itself for every rollout.

An agent's imports take seconds, a fork takes milliseconds. All else is as if the agent had been started alone: its
process, session and environment are its own, its random numbers too, and ``atexit`` functions run at its end.

What cannot be shared is refused, and the agent then starts a Python of its own: a class whose module reads a variable
that differs between rollouts while it is imported, or that leaves a thread or an open socket behind.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from empo2.recipe.controller.agent_process import play

# Most agents are clients of openai's; some import it only when they play, and it imports parts of itself later still.
_USED_BY_MOST = ("openai", "openai.resources.chat.completions")
# Set while the class is imported only: their threads, which a fork would lose, start at the import of numpy.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Import the class named by the first argument, and fork on request of the socket numbered by the second."""
    agent_class, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    os.set_inheritable(control.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    imported = import_class(agent_class)
    gc.freeze()  # the collector would write into every shared page
    environment = serve(control, imported)
    if environment is None:
        return
    sys.argv = ["-c", agent_class]  # as upstream starts it
    become_agent(environment)
    sys.exit(play(agent_class))


@dataclass(frozen=True)
class Imported:
    """What is known of an agent's class after its import.

    Attributes:
        environment: the variables during the import.
        read: the names of those that were read, and of absent ones that were asked for.
        refused: why no agent can be forked; None if they can.
    """

    environment: dict[str, str]
    read: frozenset[str]
    refused: str | None

    def refuses(self, environment: dict[str, str]) -> str | None:
        """Return why an agent with these variables cannot be forked; None if it can."""
        differ = {name for name in self.read if environment.get(name) != self.environment.get(name)}
        return self.refused or (
            f"its module reads {', '.join(sorted(differ))} while it is imported; read it in run()" if differ else None
        )


def import_class(agent_class: str) -> Imported:
    """Import the module of an agent's class, ``module:Class``, and what most agents use."""
    environment = dict(os.environ)
    module, name = agent_class.split(":")
    one_thread = {variable: "1" for variable in _ONE_THREAD if variable not in environment}
    os.environ.update(one_thread)
    refused = None
    with _recorded_reads() as (read, iterated):
        for used in _USED_BY_MOST:
            with contextlib.suppress(ImportError):
                importlib.import_module(used)
        try:
            getattr(importlib.import_module(module), name)
        except Exception as error:
            refused = f"agent.class={agent_class!r} cannot be imported: {type(error).__name__}: {error}"
    for variable in one_thread:
        del os.environ[variable]
    if iterated:
        refused = refused or "its module reads the whole environment while it is imported; read it in run()"
    return Imported(environment, frozenset(read - one_thread.keys()), refused or _cannot_fork())


@contextlib.contextmanager
def _recorded_reads() -> Any:
    """Yield two sets, filled with names of variables: asked for in ``os.environ``, and met in a walk over it."""
    asked: set[str] = set()
    met: set[str] = set()
    environ: Any = os.environ
    encode, decode = environ.encodekey, environ.decodekey
    environ.encodekey = lambda name: encode(asked.add(name) or name)
    environ.decodekey = lambda name: met.add(decode(name)) or decode(name)
    try:
        yield asked, met
    finally:
        environ.encodekey, environ.decodekey = encode, decode


def _cannot_fork() -> str | None:
    """Return what the import has left in this process that a fork would break; None if nothing."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"its module starts threads while it is imported ({threads - 1} are running); start them in run()"
    sockets = sum(stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in _open_files())
    if sockets > 1:
        return f"its module leaves {sockets - 1} sockets open while it is imported; open them in run()"
    return None


def _open_files() -> list[int]:
    """Return the open file descriptors from 3 on."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            os.fstat(int(name))
            found.append(int(name))
    return [fd for fd in found if fd > 2]


def serve(control: socket.socket, imported: Imported) -> dict[str, str] | None:
    """Fork on every request, and report the ends; return the environment in a forked agent, None at the end of all.

    A request is a socket sent over ``control``, with a JSON object of variables to read from it. It is answered by a
    line ``{"pid": ...}`` or ``{"refused": why}``; after a pid the exit code follows, on a line, when it has ended.
    """
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                pid, connection = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _answer(connection, code)
                connection.close()
                continue
            _, received, _, _ = socket.recv_fds(control, 1, 1)
            if not received:
                return None
            connection = socket.socket(fileno=received[0])
            with connection.makefile("rb") as stream:
                environment = json.load(stream)
            if reason := imported.refuses(environment):
                _answer(connection, {"refused": reason})
                connection.close()
                continue
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                # First: when this server is killed and the connection closes, the controller ends the agent's session.
                os.setsid()
                _forget(selector, control, connection)
                return environment
            _answer(connection, {"pid": pid})
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _answer(connection: socket.socket, answer: Any) -> None:
    with contextlib.suppress(OSError):  # the controller has ended
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _forget(selector: selectors.BaseSelector, control: socket.socket, connection: socket.socket) -> None:
    """Close, in a forked agent, what belongs to the server."""
    for key in list(selector.get_map().values()):
        if key.data:
            os.close(key.fd)
            key.data[1].close()
    selector.close()
    control.close()
    connection.close()


def become_agent(environment: dict[str, str]) -> None:
    """Give this forked process variables and random numbers of its own."""
    os.environ.clear()
    os.environ.update(environment)
    if numpy := sys.modules.get("numpy.random"):  # Python's own generator is seeded anew by a fork
        reseed: Callable[[], None] = numpy.seed
        reseed()
