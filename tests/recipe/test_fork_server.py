"""Processes that are forked in the place of ``python SCRIPT``, as Ray starts its workers; without verl and Ray."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, os, signal, sys
if __name__ == "__main__":
    import multiprocessing, numpy, random
    told = {"imported": "colorsys" in sys.modules, "arguments": sys.argv, "folder": os.getcwd()}
    told |= {"variables": dict(os.environ), "start": multiprocessing.get_start_method()}
    told |= {"random": [random.random(), numpy.random.random()]}
    print(json.dumps(told), flush=True)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else sys.exit(int(sys.argv[1]))
"""
TRAINER = """
import json, os, sys
from empo2.recipe.trainer.compat import fork_server
if sys.argv[1] == "ray":
    sys.modules["ray"] = object()
fork_server.start("preloaded")
assert ("colorsys" in sys.modules) == (sys.argv[1] != "ray")
print(json.dumps([fork_server.worker_command(), os.environ[fork_server._ADDRESS]]), flush=True)
sys.stdin.read()
"""


def trainer(folder: Path, loaded: str) -> subprocess.Popen[str]:
    (folder / "preloaded.py").write_text("import colorsys, numpy.random")
    command, variables = [sys.executable, "-c", TRAINER, loaded], {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def worker(command: str, address: str, script: Path, *arguments: str) -> tuple[int, Any]:
    """Exit code and what the script told, of a command that a shell starts as Ray lets it."""
    line = f"exec {command} {shlex.join([str(script), *arguments])}"
    variables = {"PATH": os.environ["PATH"], "OF_ITS_OWN": "1", "EMPO2_FORK_SERVER": address}
    done = subprocess.run(["bash", "-c", line], env=variables, cwd=script.parent, stdout=subprocess.PIPE, timeout=60)
    return done.returncode, json.loads(done.stdout or "null")


@pytest.mark.parametrize("loaded", ["nothing", "ray"])  # the server is a fork of the trainer, or a Python of its own
def test_a_fork_is_as_a_python_of_its_own_without_its_imports(tmp_path: Path, loaded: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with trainer(tmp_path, loaded) as started:
        assert started.stdin and started.stdout
        command, address = json.loads(started.stdout.readline())
        # A fork prints where the trainer does.
        codes, told = [], []
        for arguments in (["0", "a b"], ["7"], ["killed"]):
            codes.append(worker(command, address, script, *arguments)[0])
            told.append(json.loads(started.stdout.readline()))
        assert codes[:2] == [0, 7] and codes[2] != 0
        assert all(each["imported"] and each["folder"] == str(tmp_path) for each in told)
        assert told[0]["arguments"] == [str(script), "0", "a b"]
        assert told[0]["variables"]["OF_ITS_OWN"] == "1" and "HOME" not in told[0]["variables"]
        assert told[0]["start"] == "fork"  # Python's default
        assert told[0]["random"][0] != told[1]["random"][0] and told[0]["random"][1] != told[1]["random"][1]
        started.stdin.close()
        assert started.wait(60) == 0
    # The server has ended with its trainer: a Python of its own, which prints to its own output.
    code, alone = worker(command, address, script, "7", "c")
    assert (code, alone["imported"], alone["arguments"]) == (7, False, [str(script), "7", "c"])
    assert not Path(address).exists()
