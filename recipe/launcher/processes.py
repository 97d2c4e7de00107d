"""Start, check and stop the processes of a run, each under a guard so that none outlives the launcher."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from empo2.agents.process_guard import adopt_orphans, end_descendants, guarded
from empo2.recipe import interruption, preemption
from empo2.recipe.errors import Preempted, ProcessError
from empo2.recipe.failures import first_error, signal_of

_STOP_SECONDS = 20
_KILL_SECONDS = 5
_STEADY_SECONDS = 60
_LOG_LINES = 15
_LOG_BYTES = 2**20  # of its end, which is read
_LEAST_FREE = 2**20  # bytes of a disk; a process that needed more may have met its end there
_ERROR_LINES = 200  # an error above them is one that the process has survived
_ERROR = "empo2: error: "


@contextlib.contextmanager
def running(directory: Path, environment: dict[str, str]) -> Iterator["Processes"]:
    """Yield an empty set of processes, and stop all that were started when the block is left.

    Only ``Processes.check`` raises for Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP, so that they cannot interrupt the stopping.

    Raises:
        KeyboardInterrupt: Ctrl-C came before, and a library dropped it.
    """
    with contextlib.ExitStack() as ends:
        scratch = ends.enter_context(tempfile.TemporaryDirectory(prefix="empo2-", ignore_cleanup_errors=True))
        # Locks and sockets that verl, vLLM and ZeroMQ leave behind. Ray's logs and compiled kernels are to stay.
        temporary = Path(tempfile.gettempdir())
        kept = {
            "RAY_TMPDIR": str(temporary / "ray"),
            "TORCHINDUCTOR_CACHE_DIR": str(temporary / f"torchinductor_{os.environ.get('USER') or os.getuid()}"),
        }
        processes = Processes(directory, {**kept, **environment, "TMPDIR": scratch}, scratch)
        handlers = {signal.SIGINT: processes.interrupt} | dict.fromkeys(preemption.WARNINGS, processes.warn)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            handlers[signal.SIGHUP] = processes.interrupt
        for number, handler in handlers.items():
            ends.callback(signal.signal, number, signal.signal(number, handler))
        interruption.check()
        ends.enter_context(ending_descendants())  # also children of a guard that is killed
        ends.callback(processes.stop)
        yield processes


@contextlib.contextmanager
def ending_descendants() -> Iterator[None]:
    """End all descendants of this process when the block is left."""
    adopt_orphans()
    try:
        yield
    finally:
        end_descendants()


@dataclass
class Processes:
    """The processes of one run, each with a log in ``directory`` and a guard that ends its descendants."""

    directory: Path
    environment: dict[str, str]
    scratch: str = ""  # a folder that outlives neither them nor this process
    warned: str | None = None  # the signal after which a process saves and ends
    _interrupted: bool = False
    _guards: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _trains: set[str] = field(default_factory=set)
    _begun: dict[str, int] = field(default_factory=dict)  # bytes of a log before its process was first started
    _restartable: dict[str, tuple[Callable[[], None], float]] = field(default_factory=dict)  # its start, and when
    _restarted: set[str] = field(default_factory=set)

    def start(
        self,
        name: str,
        command: list[str],
        *,
        secrets: Mapping[str, str] | None = None,
        inherit: tuple[int, ...] = (),
        restartable: bool = False,
        trains: bool = False,
    ) -> None:
        """Start a command.

        Args:
            secrets: variables of its own.
            inherit: file descriptors for the command.
            restartable: ``check`` may start the command again if it ends.
            trains: it may end with exit code 0, and at SIGUSR1 it saves and ends.
        """
        if trains:
            self._trains.add(name)
        if restartable:
            again = partial(self.start, name, command, secrets=secrets, inherit=inherit, restartable=True)
            self._restartable[name] = again, time.monotonic()
        with (self.directory / f"{name}.log").open("ab") as log:
            self._begun.setdefault(name, log.tell())
            self._guards[name] = subprocess.Popen(
                guarded(command, grace=_STOP_SECONDS, scratch=self.scratch),
                stdin=subprocess.PIPE,  # held open while this process lives
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, **(secrets or {})},
                pass_fds=inherit,
                start_new_session=True,  # only the launcher handles Ctrl-C
            )

    def done(self, name: str) -> bool:
        """Return True once a process has ended without an error."""
        return self._guards[name].poll() == 0

    def pid(self, name: str) -> int:
        """Return the id of a process's guard, whose descendants are all that the process has started."""
        return self._guards[name].pid

    def descendants(self, name: str) -> list[psutil.Process]:
        """Return all that a process has started, and itself; none before its start and after its end."""
        with contextlib.suppress(KeyError, psutil.NoSuchProcess):
            return psutil.Process(self.pid(name)).children(recursive=True)
        return []

    def check(self) -> list[str]:
        """Start processes again that may be, and raise if the run must end.

        A process that ends within a minute of its start is started again only if a signal ended it, and only once.

        Returns:
            One line for each process that was started again.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGHUP; after SIGTERM or SIGUSR1 if nothing trains, or the second one.
            Preempted: what trains has ended after the first one.
            ProcessError: a process ended; the message has the first error in its log, or the end of it.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        restarted = []
        for name, guard in list(self._guards.items()):
            code = guard.poll()
            if code is None or (code == 0 and name in self._trains):
                continue
            if self.warned and name in self._trains and signal_of(code) in (signal.SIGINT, *preemption.WARNINGS):
                raise Preempted(f"{self.warned} ended the run")
            start_again, started = self._restartable.get(name, (None, math.inf))
            steady = time.monotonic() - started >= _STEADY_SECONDS
            killed_once = signal_of(code) and name not in self._restarted
            if start_again is None or not (steady or killed_once):
                reason = _reason_in(self.directory / f"{name}.log", self._begun[name], code)
                raise ProcessError(f"{name} {_describe_exit(code)}: {reason}")
            assert guard.stdin
            guard.stdin.close()
            start_again()
            self._restarted.add(name)
            restarted.append(f"{name} {_describe_exit(code)} and was started again")
        return restarted

    def interrupt(self, *_: Any) -> None:
        """Make the next ``check`` raise KeyboardInterrupt (signal handler)."""
        self._interrupted = True

    def warn(self, number: int, _: Any) -> None:
        """Let what trains save, and the run end then; if nothing does, or at the second signal, interrupt (handler)."""
        if self.warned or not self._trains:
            self.interrupt()
            return
        self.warned = signal.Signals(number).name
        for name in self._trains & self._guards.keys():
            self._guards[name].send_signal(preemption.WARNING)

    def stop(self) -> None:
        """End all processes and their descendants: send SIGTERM, then SIGKILL after the grace time."""
        for name, guard in self._guards.items():
            if name in self._trains:  # SIGTERM is then the second warning
                guard.send_signal(preemption.WARNING)
            assert guard.stdin
            guard.stdin.close()
        deadline = time.monotonic() + _STOP_SECONDS + _KILL_SECONDS
        for guard in self._guards.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(max(0.1, deadline - time.monotonic()))


def _describe_exit(code: int) -> str:
    return f"was ended by {signal.Signals(signal_of(code)).name}" if signal_of(code) else f"ended with exit code {code}"


def _reason_in(log: Path, begun: int, code: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begun, log.stat().st_size - _LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    if (free := shutil.disk_usage(log.parent).free) < _LEAST_FREE:  # what it said last may not be in its log
        return f"the disk of {log.parent} is full ({free / 2**20:.1f} MiB left); make room there"
    # Behind a worker's line, if Ray had not ended that yet.
    if errors := [error for line in lines for _, found, error in [line.partition(_ERROR)] if found]:
        return errors[-1]
    if not signal_of(code) and (error := first_error("\n".join(lines[-_ERROR_LINES:]))):
        return f"{error} ({log})"
    return f"the end of {log}:\n" + "\n".join(lines[-_LOG_LINES:])
