"""The room of an episode: a folder, a HOME and a /tmp of its own, and an end for all that was started in it."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ..process_guard import guarded

HOME, TESTS, LOGS, TMP = "/agent", "/tests", "/logs", "/tmp"
TIMED_OUT = -1
_STDERR = 2
_NAMES = {HOME: "home", TESTS: "tests", LOGS: "logs", TMP: "tmp"}


class Room:
    """Plays commands in folders that have the same paths in each episode, if bubblewrap runs here.

    With bubblewrap the rest of the host is read-only, and a room's processes are a PID namespace, which ends with the
    command. Without it the folders have other paths, which ``shown`` puts into texts; what a command has started is
    ended with it by the process guard, daemons too.

    Args:
        scratch: an empty folder, for all that a room writes.
        workdir: path that the command's folder is to have.
        hidden: a folder that cannot be seen, with bubblewrap.

    Attributes:
        isolated: True with bubblewrap.
        variables: that every command is to have.
    """

    def __init__(self, scratch: Path, workdir: str, hidden: Path) -> None:
        self._scratch, self._workdir, self._hidden = scratch, workdir, hidden
        self._folders = {path: scratch / name for path, name in _NAMES.items()} | {workdir: scratch / "work"}
        for path in (HOME, LOGS, TMP):
            self._folders[path].mkdir()
        self.isolated = shutil.which("bwrap") is not None and self._bubblewrap_runs()
        home, tmp = (HOME, TMP) if self.isolated else (str(self._folders[HOME]), str(self._folders[TMP]))
        self.variables = {"HOME": home, "TMPDIR": tmp, "TMUX_TMPDIR": tmp}

    def outside(self, path: str) -> Path:
        """Return the host's path of one of the room's folders."""
        return self._folders[path]

    def shown(self, text: str) -> str:
        """Return a text with the room's paths as its commands find them."""
        if self.isolated:
            return text
        paths = "|".join(re.escape(path) for path in (self._workdir, TESTS, LOGS))
        return re.sub(rf"(?<![\w./~-])({paths})(?![\w-])", lambda found: str(self._folders[found[1]]), text)

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], seconds: float, output: IO[bytes] | int = _STDERR
    ) -> int:
        """Run a command in the room's folder. Everything that it started has ended then.

        Returns its exit code, or TIMED_OUT.
        """
        cwd = None if self.isolated else self._folders[self._workdir]
        words = [*self._bubblewrap(), *command] if self.isolated else [*command]
        with subprocess.Popen(
            guarded(words),
            env={**variables},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT  # the guard ends all when its input is closed
        return code

    def _bubblewrap(self) -> list[str]:
        mounted = {path: folder for path, folder in self._folders.items() if folder.exists()}
        words = ["bwrap", "--unshare-pid", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
        taken = {"proc", "dev", *(path.split("/")[1] for path in mounted)}
        for entry in sorted(os.scandir("/"), key=lambda each: each.name):
            if entry.is_symlink():
                words += ["--symlink", os.readlink(entry), entry.path]
            elif entry.name not in taken:
                words += ["--ro-bind", entry.path, entry.path]
        if self._hidden.parts[1] not in taken:
            words += ["--tmpfs", str(self._hidden)]
        for path, folder in mounted.items():
            words += ["--bind", str(folder), path]
        return [*words, "--chdir", self._workdir if self._workdir in mounted else "/"]

    def _bubblewrap_runs(self) -> bool:
        """Return False where a container or the kernel's settings forbid the namespaces."""
        done = subprocess.run([*self._bubblewrap(), "true"], capture_output=True, timeout=60)
        return done.returncode == 0
