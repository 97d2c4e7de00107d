"""Without a GPU, Ray's workers and vLLM's engine are forks of a process that has imported what they need.

Each would import it again, for 9 to 14 CPU seconds and half a gigabyte. Ray 2.60 starts workers by a command
(``RuntimeEnvContext.py_executable``), vLLM 0.20.2 its engine by ``get_mp_context``; both ask a fork server of Python's
here. On a GPU nothing is forked, since what is imported asks for CUDA, which a fork cannot use then. It is not the
controller's fork server (`warm_agents`): that one is Python's as it is, and agents shall not carry vLLM.
"""

# pyright: reportAttributeAccessIssue=false
# multiprocessing gives no types to what a fork server is made of.
import importlib
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import sys
import threading
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

_ADDRESS = "EMPO2_FORK_SERVER"


class _Fork(ForkServerProcess):
    """A forked process with the environment of its creator."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        sys.modules["numpy.random"].seed()  # Python's own generator is seeded anew by a fork
        super().run()


class Forks(ForkServerContext):
    """What replaces a context of multiprocessing that spawns."""

    Process = _Fork  # pyright: ignore[reportAssignmentType]


def start(preload: str = "empo2.recipe.trainer.compat.preload") -> None:
    """Start the server, which has imported a module; it ends with this process.

    It is a fork of this process, which needs the same imports, unless Ray or a thread is there already.
    """
    if "ray" in sys.modules or threading.active_count() > 1:
        multiprocessing.set_forkserver_preload([preload])
        forkserver.ensure_running()
        os.environ[_ADDRESS] = forkserver._forkserver._forkserver_address
        return
    importlib.import_module(preload)
    address = connection.arbitrary_address("AF_UNIX")  # in a folder of this user alone
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    end, alive = os.pipe()  # this process keeps it open
    if not os.fork():
        try:
            os.close(alive)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            forkserver.main(listener.detach(), end, [])
        finally:
            os._exit(0)
    listener.close()
    os.close(end)
    os.environ[_ADDRESS] = address


def worker_command() -> str | None:
    """Return the command for Ray to start workers with in the place of ``python``; None without a fork server."""
    code = f"from {__name__} import start_worker; start_worker()"
    return shlex.join([sys.executable, "-P", "-c", code]) if _ADDRESS in os.environ else None


def join_server() -> bool:
    """Let this process fork from the server, and never start one of its own; return whether there is a server."""
    if _ADDRESS not in os.environ:
        return False
    server = forkserver._forkserver
    server._forkserver_address = os.environ[_ADDRESS]
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = lambda: None
    return True


def start_worker() -> None:
    """Be ``python SCRIPT ARGUMENT…`` in a fork: wait for its end, and exit with its code."""
    join_server()
    arguments = sys.argv[1:]
    worker = _Fork(target=_run, args=(arguments,))
    try:
        worker.start()
    except OSError:  # another machine, or the server has ended
        os.execv(sys.executable, [sys.executable, *arguments])
    worker.join()
    sys.exit(worker.exitcode)


def _run(arguments: list[str]) -> None:
    multiprocessing.set_start_method(None, force=True)  # the default again
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
