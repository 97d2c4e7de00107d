"""vLLM's engine process on a CPU, forked from a process that has imported vLLM already.

vLLM spawns its engine process from the server and imports itself a second time there, which takes another 20 s. A fork
server started first does this import on the other core while the server does its own.
"""

import ctypes
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import signal

_PR_SET_PDEATHSIG = 1


class EngineProcess(multiprocessing.context.ForkServerProcess):
    """A forked process with the environment of its creator instead of the fork server's older one."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        # Ray ends its workers' children, such as the fork server, and not their children.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.update(self._environment)
        super().run()


class EngineContext(multiprocessing.context.ForkServerContext):
    Process = EngineProcess  # pyright: ignore[reportAssignmentType]


def start_fork_server() -> EngineContext:
    """Start a fork server that imports vLLM in the background; the context forks from it."""
    context = EngineContext()
    context.set_forkserver_preload(
        ["empo2.recipe.trainer.compat.vllm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]
    )
    multiprocessing.forkserver.ensure_running()
    return context
