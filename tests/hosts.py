"""Hosts on one machine: network namespaces on a bridge, each with its own interface, address and /tmp/ray."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

NETWORK = "10.77.0.0/24"
# Own mounts, which end with the process: Ray's sockets and files of two hosts would meet.
_INSIDE = 'mount --bind "$1" /tmp/ray && shift && exec "$@"'


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    folder: Path

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, "sh", "-c", _INSIDE, "sh", str(self.folder), *words]

    def start(self, log: Path, *words: str, **variables: str) -> psutil.Popen:
        """Start a command with these variables and no others of Ray, EMPO² or the keys."""
        kept = {key: each for key, each in os.environ.items() if not key.startswith(("RAY_", "EMPO2_", "CUDA_"))}
        with log.open("ab") as file:
            return psutil.Popen(
                self.command(*words), env={**kept, **variables}, stdout=file, stderr=file, cwd=self.folder
            )

    def processes(self) -> list[psutil.Process]:
        """Those in the host's namespace, however they are called: Ray's agents write over their environment."""
        found = []
        words = ["ip", "netns", "pids", self.name]
        for pid in subprocess.run(words, capture_output=True, text=True).stdout.split():
            with contextlib.suppress(psutil.Error):
                if (process := psutil.Process(int(pid))).status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def listening(self) -> dict[tuple[str, int], str]:
        """The addresses and ports that other hosts may connect to, and the process behind each."""
        found = {}
        for line in self._sockets("-ltnpH"):
            host, port = _at(line)
            if not host.startswith("127.") and host != "::1":
                found[self.address if host in ("0.0.0.0", "*", "::") else host, port] = line.partition("users:")[2]
        return found

    def peers(self) -> set[tuple[str, int]]:
        """The addresses and ports of other hosts that this one is connected to."""
        found = {_at(line, 4) for line in self._sockets("-tnH")}  # without those that listen
        return {(host, port) for host, port in found if not host.startswith("127.") and host != "::1"}

    def _sockets(self, options: str) -> list[str]:
        words = ["ip", "netns", "exec", self.name, "ss", options]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()

    def route(self, verb: str, other: "Host") -> None:
        """``add`` or ``del`` the rule that this host cannot connect to the other one."""
        subprocess.run(["ip", "-n", self.name, "route", verb, "prohibit", f"{other.address}/32"], check=True)

    def die(self) -> None:
        """Be gone at once, as without power: nothing that was connected is told."""
        subprocess.run(["ip", "-n", self.name, "link", "set", "eth0", "down"], check=True)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def come_back(self) -> None:
        subprocess.run(["ip", "-n", self.name, "link", "set", "eth0", "up"], check=True)


def _at(line: str, column: int = 3) -> tuple[str, int]:
    """Address and port in a column of what ss says: the local ones are in the fourth one, the other end's after it."""
    host, _, port = line.split()[column].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:").partition("%")[0], int(port)


@contextlib.contextmanager
def hosts[H: Host](folder: Path, count: int, kind: type[H] = Host) -> Iterator[list[H]]:
    """Yield hosts that reach each other at 10.77.0.1, .2, …; skip the test where there can be none."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "ss", "mount"))):
        pytest.skip("needs root and iproute2 for network namespaces")
    tag = uuid.uuid4().hex[:6]
    made = [kind(f"e{tag}{number}", f"10.77.0.{number + 1}", folder / f"host{number}") for number in range(count)]
    bridge = f"e{tag}"
    Path("/tmp/ray").mkdir(exist_ok=True)
    try:
        spaces = [f"netns add {host.name}" for host in made]
        for line in (f"link add {bridge} type bridge", f"link set {bridge} up", *spaces):
            if (done := subprocess.run(["ip", *line.split()], capture_output=True, text=True)).returncode:
                pytest.skip(f"no network namespaces: {done.stderr.strip()}")
        for host in made:
            host.folder.mkdir()
            for line in (
                f"link add {host.name} type veth peer name eth0 netns {host.name}",
                f"link set {host.name} master {bridge} up",
                f"-n {host.name} addr add {host.address}/24 dev eth0",
                f"-n {host.name} link set eth0 up",
                f"-n {host.name} link set lo up",
            ):
                subprocess.run(["ip", *line.split()], check=True)
        yield made
    finally:
        for host in made:
            for process in host.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
