"""Notice that a process of Ray or vLLM has ended while the trainer goes on waiting for it."""

import contextlib
import re
import time

import psutil

from empo2.recipe.errors import ProcessError

# By the titles that they give themselves. Without Ray's servers or verl's and vLLM's workers no step can be completed;
# the trainer may learn of it only after all rollouts of the step have failed at a model server that is gone.
_VITAL = re.compile(r"gcs_server|raylet|ray::(vLLMHttpServer|WorkerDict)|VLLM::\w+")
_LOOK_SECONDS = 5
_GRACE_SECONDS = 30  # the trainer ends its workers itself when it is done, and may be about to report an error


class Workers:
    """The vital processes of Ray and vLLM among the descendants of this process."""

    def __init__(self) -> None:
        self._seen: dict[psutil.Process, str] = {}
        self._ended: dict[str, float] = {}
        self._looked = -float("inf")

    @property
    def serve(self) -> bool:
        """Whether a server of vLLM has been seen, which is started when the policy is loaded."""
        return any("vLLM" in title for title in self._seen.values())

    def check(self) -> None:
        """Look for new ones, and for those that have ended; return at once if the last look was seconds ago.

        Raises:
            ProcessError: one ended half a minute ago, and the trainer still runs.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for process in [process for process in self._seen if not _is_alive(process)]:
            self._ended.setdefault(self._seen.pop(process), now)
        for title, ended in self._ended.items():
            if now - ended >= _GRACE_SECONDS:
                raise ProcessError(f"{title} has ended, and the trainer waits for it")
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if process not in self._seen and (title := _VITAL.match(process.cmdline()[0].rpartition("/")[2])):
                    self._seen[process] = f"{title[0]} (process {process.pid})"


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
