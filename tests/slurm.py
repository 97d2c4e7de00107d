"""A real Slurm by the set-up of CONTRIBUTING.md. Nodes are network namespaces, each with its name, munge and /tmp."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from .hosts import Host, hosts
from .processes import until
from .stack import environment

ROOT = Path(__file__).parents[1]
CPUS = 8  # that a node says it has
# A node's own name, munge and /tmp, in which only the checkout and the test's folder are those of the machine.
_INSIDE = """
hostname "$1" && mkdir -p "$2/run" "$2/tmp" && shift
for shared in "$2" "$3"; do
    case $shared in /tmp/*) mkdir -p "$1$shared" && mount --bind "$shared" "$1$shared" ;; esac
done
mkdir -p /run/munge && mount --bind "$1/run" /run/munge && mount --rbind "$1/tmp" /tmp && shift 3 && exec "$@"
"""


@dataclass(frozen=True)
class Node(Host):
    """A node, whose processes are those of its network namespace."""

    @property
    def label(self) -> str:
        return f"n{self.address.rpartition('.')[2]}"

    def command(self, *words: str) -> list[str]:
        inside = ["sh", "-e", "-c", _INSIDE, "sh", self.label, str(self.folder), str(ROOT), str(self.folder.parent)]
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", *inside, *words]

    def run(self, *words: str, **variables: str) -> str:
        """Run a command to its end; return its output."""
        path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        given = environment(SLURM_CONF=str(self.folder.parent / "slurm.conf"), PATH=path, **variables)
        with tempfile.TemporaryFile("w+") as said:  # a pipe would be held open by the daemons
            code = subprocess.run(self.command(*words), env=given, cwd=ROOT, stdout=said, stderr=said).returncode
            said.seek(0)
            text = said.read()
        assert code == 0, text
        return text

    def titles(self) -> dict[str, psutil.Process]:
        """Return the command lines of its processes."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found[" ".join(process.cmdline())] = process
        return found

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"


def set_up(folder: Path, nodes: list[Node]) -> str:
    """Return the set-up of CONTRIBUTING.md for these nodes, without its first command and its last one."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### Slurm without a cluster")[2]
    lines = text.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert lines[0].startswith("apt-get") and lines[-1].startswith("sbatch")
    block = "\n".join(lines[1:-1])
    last = len(nodes)
    for given, ours in (
        ("/var/tmp/slurm", str(folder)),
        ("$(hostname -s)(127.0.0.1)", f"n1({nodes[0].address})"),
        (
            "NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=8",
            f"NodeName=n[1-{last}] NodeAddr=10.77.0.[1-{last}] CPUs={CPUS}",
        ),
        (
            "ClusterName",
            "AuthInfo=cred_expire=5\nSchedulerParameters=bf_interval=5\nClusterName",
        ),  # no waits of minutes
        (" && sinfo", ""),
    ):
        assert given in block, given
        block = block.replace(given, ours)
    return block


@contextlib.contextmanager
def slurm(folder: Path, count: int) -> Iterator[list[Node]]:
    """Yield the nodes of a cluster, the controller on the first one; skip the test where there can be none."""
    if missing := [each for each in ("slurmctld", "slurmd", "munged", "unshare") if shutil.which(each) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    with hosts(folder, count, Node) as nodes:
        block = set_up(folder, nodes)
        for node in nodes:
            node.run("bash", "-e", "-c", block if node is nodes[0] else block.replace("slurmctld && ", ""))
        until(lambda: nodes[0].run("sinfo", "-h", "-p", "main", "-o", "%t %D").split() == ["idle", str(count)])
        yield nodes
