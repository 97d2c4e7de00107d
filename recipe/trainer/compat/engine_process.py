"""vLLM's engine process on a CPU, forked from a process that has imported vLLM already.

vLLM spawns its engine from the server and imports itself there a second time, 20 s after the server has done so. A
fork server that is started first imports on the other core while the server imports here.
"""

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os


class EngineProcess(multiprocessing.context.ForkServerProcess):
    """A forked process with the environment of its creator: the fork server's own is older."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class EngineContext(multiprocessing.context.ForkServerContext):
    Process = EngineProcess  # pyright: ignore[reportAssignmentType]


def start_fork_server() -> EngineContext:
    """Start to import vLLM in the background; the context forks from there."""
    context = EngineContext()
    context.set_forkserver_preload(
        ["empo2.recipe.trainer.compat.vllm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]
    )
    multiprocessing.forkserver.ensure_running()
    return context
