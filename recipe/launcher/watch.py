"""Follow a run from its start to its end, for those who wait; notice that a worker that it needs has ended."""

import contextlib
import math
import re
import time
from pathlib import Path

import httpx
import psutil

from empo2.recipe.errors import Empo2Error, ProcessError
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.launcher.processes import Processes
from empo2.recipe.launcher.progress import Metrics, NewLines, RunProgress
from empo2.recipe.marked_lines import loading_in, note_in
from empo2.recipe.rollout_log import read_dropped
from empo2.recipe.run_folder import METRICS_FILE, ROLLOUTS

_POLL_SECONDS = 0.5
_ASK_SECONDS = 1
_ANSWER_SECONDS = 3  # while the gateway is silent, nobody looks whether the processes live
# By the titles that they give themselves. Without Ray's servers or verl's and vLLM's workers no step can be completed;
# the trainer may learn of it only after all rollouts of the step have failed at a model server that is gone.
_VITAL = re.compile(r"gcs_server|raylet|ray::(vLLMHttpServer|WorkerDict)|VLLM::\w+")
_RAYLETS_LOG = "--stdout_filepath="  # an argument of Ray's raylet
_MEMORY = re.compile(r"OOM kill reason: (.+)")
_LOOK_SECONDS = 5
_GRACE_SECONDS = 30  # the trainer ends its workers itself when it is done, and may be about to report an error


class Watch:
    """Shows what the trainer writes to the run's folder and what the gateway counts, from the start to the end.

    Created before the trainer is started, whose log and metrics are in the folder of the processes.
    """

    def __init__(self, processes: Processes, shown: RunProgress) -> None:
        self._processes, self._shown = processes, shown
        self._run = processes.directory
        self._metrics = NewLines(self._run / METRICS_FILE)
        self._log = NewLines(self._run / "trainer.log")
        self._workers = Workers(processes)
        self._causes: set[tuple[str, str]] = set()
        self._asked = -math.inf
        self._warned = False

    def until_done(self, gateway: GatewayClient) -> None:
        """Return when the trainer is done; raise as `look`."""
        done = False
        while not done:
            done = self._processes.done("trainer")
            try:
                self.look()
            finally:
                for metrics in self._metrics.rows():
                    self._shown.step(metrics)
                    self._say_new_causes(metrics)
            if self._shown.stage == "" and time.monotonic() - self._asked >= _ASK_SECONDS:
                self._asked = time.monotonic()
                with contextlib.suppress(httpx.HTTPError):
                    self._shown.playing(gateway.progress(_ANSWER_SECONDS))
            if not done:
                time.sleep(_POLL_SECONDS)

    def look(self) -> None:
        """Show what the trainer has said since the last look; raise as `Processes.check` and `Workers.check`."""
        processes, shown = self._processes, self._shown
        if processes.warned and not self._warned:
            self._warned = True
            shown.say(f"{processes.warned}: the step is finished and a checkpoint saved; a second signal ends at once")
        for restarted in processes.check():
            shown.say(f"{restarted}; the rollouts that were being played have failed")
        self._workers.check()
        for line in self._log.read():
            text = line.decode(errors="replace")
            if (stage := loading_in(text)) is not None:
                shown.loading(stage)
            elif note := note_in(text):
                shown.say(f"note   {note}")
        if shown.stage == "policy" and self._workers.serve:
            shown.loading("vLLM")

    def _say_new_causes(self, metrics: Metrics) -> None:
        """Say why rollouts of a step were dropped, where that is the first time."""
        if not metrics.get("empo2/rollouts_dropped") and not metrics.get("val/rollouts_dropped"):
            return
        with contextlib.suppress(Empo2Error):
            for dropped in read_dropped(self._run / ROLLOUTS, metrics["step"]):
                if (dropped.reason, dropped.cause) not in self._causes:
                    self._causes.add((dropped.reason, dropped.cause))
                    self._shown.say(f"dropped  {dropped.told(self._run)}")


class Workers:
    """The vital processes of Ray and vLLM among the trainer's descendants; agents may have some of their own."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._seen: dict[psutil.Process, str] = {}
        self._ended: dict[str, float] = {}
        self._logs: list[Path] = []  # of Ray's raylets
        self._looked = -float("inf")

    @property
    def serve(self) -> bool:
        """Whether a server of vLLM has been seen, which is started when the policy is loaded."""
        return any("vLLM" in title for title in self._seen.values())

    def check(self) -> None:
        """Look for new and ended ones every few seconds; a ProcessError half a minute after one has ended."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for process in [process for process in self._seen if not _is_alive(process)]:
            self._ended.setdefault(self._seen.pop(process), now)
        for title, ended in self._ended.items():
            if now - ended >= _GRACE_SECONDS:
                raise ProcessError(f"{title} has ended, and the trainer waits for it{self._killed()}")
        for process in self._processes.descendants("trainer"):
            with contextlib.suppress(psutil.Error, IndexError):
                words = process.cmdline()
                if process not in self._seen and (title := _VITAL.match(words[0].rpartition("/")[2])):
                    self._seen[process] = f"{title[0]} (process {process.pid})"
                    logs = (word.removeprefix(_RAYLETS_LOG) for word in words if word.startswith(_RAYLETS_LOG))
                    self._logs += map(Path, logs)

    def _killed(self) -> str:
        """Return why Ray has killed workers, as it does where the machine has no memory left; "" if it has not."""
        for log in self._logs:
            with contextlib.suppress(OSError):
                if reasons := _MEMORY.findall(log.read_text(errors="replace")):
                    return f": Ray killed it for want of memory: {reasons[-1]}; see what else runs on this machine"
        return ""


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
