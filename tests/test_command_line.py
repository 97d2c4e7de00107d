"""Wrong input: one clear line, the right exit code, nothing started. And processes: nothing left running."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
import torch

from empo2.recipe.cli import main
from empo2.recipe.config import TRACES_VARIABLES
from empo2.recipe.preflight.finding import Finding
from empo2.recipe.preflight.machine import Gpus
from empo2.small_model.demo import ALONE, WITH_NOTES

from .processes import until
from .stack import CLI

pytestmark = pytest.mark.slow

INTERRUPTED = "empo2: interrupted; everything that was started has been stopped\n"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """A command in this process and an empty folder; its exit code, and what it wrote to stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    umask = os.umask(0o077)  # as the commands do

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments])
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    yield run
    os.umask(umask)
    structlog.reset_defaults()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verl.trainer.foo=1"], ["verl.trainer.foo=1"]),
        (["tasks.args.names=[find-animals]"], ["find-animals", "find-animal"]),
        (["agent.class=empo2.agents.scienceworld.agent:Nobody"], ["agent.class", "Nobody"]),
        (["agent.class=no_such_module:Agent"], ["agent.class", "no_such_module"]),
        (["agent.class=empo2.agents.scienceworld.agent:Outcome"], ["agent.class", "run()"]),
        (["model.path=./no/such/model"], ["model.path", "no/such/model"]),
        (["memory.scope=[task,planet]"], ["memory.scope", "planet", "variation"]),
        (["--profile", "gpu-1"], ["hardware.gpus_per_node=1", "--profile cpu"]),
        (["--ablation", "no-musk"], ["ablation 'no-musk'", "did you mean no-mask?"]),
        (["--confg", "x"], ["No such option: --confg", "--config", "see empo2 train --help"]),
        (["algorithm.seed=x", "--ablation", "no-mask", "run.steps=y"], ["algorithm.seed='x'", "run.steps='y'"]),
        (["gateway.port=PORT"], ["gateway.port=PORT"]),
        (["run.directory=FILE/runs"], ["run.directory='FILE/runs': ", "cannot be written"]),
    ],
)
def test_wrong_settings_are_one_line(cli: Cli, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    if "gpu-1" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (tmp_path / "FILE").write_text("")
    profile = [] if "--profile" in arguments else ["--profile", "cpu"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, errors = cli("train", *profile, *(word.replace("PORT", port) for word in arguments))
    assert code == 2, errors
    (line,) = errors.splitlines()
    assert line.startswith("empo2: error: ")
    assert all(word.replace("PORT", port) in line for word in words), line
    assert not (tmp_path / "runs").exists()


def test_the_demo_takes_settings(cli: Cli) -> None:
    """Such as run.name and run.resume, by which a demo that was interrupted says it goes on."""
    code, _, errors = cli("demo", "run.name=mine", "run.resume=auto", "run.steps=x")
    assert (code, errors.count("\n")) == (2, 1) and "run.steps='x'" in errors, errors


def test_a_memory_that_cannot_be_read_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    rates = {name: 0.5 for name in (ALONE, WITH_NOTES)}
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps({"step": n, **rates}) + "\n" for n in (0, 1)))
    (tmp_path / "run/memory.sqlite").write_text("years of work")
    code, _, errors = cli("demo", "--run", "run")
    assert (code, errors.count("\n")) == (1, 1) and errors.startswith("empo2: error: run/memory.sqlite: "), errors


def test_a_file_that_cannot_be_used_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text("")
    model = ["smollm2-135m-notes", "--profile", "cpu", "--panel", "coin-medium"]
    code, _, errors = cli("eval", *model, "--output", "FILE")
    assert (code, errors) == (1, "empo2: error: FILE: File exists\n"), errors


def test_a_key_and_java_that_are_missing_are_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPO2_KEY", "")
    code, _, errors = cli("gateway", "--profile", "cpu", "gateway.host=0.0.0.0")
    assert code == 2 and "gateway.host=0.0.0.0" in errors and "EMPO2_ADMIN_KEY" in errors
    monkeypatch.setenv("JAVA", "/nowhere/java")
    code, _, errors = cli("train", "--profile", "cpu")
    assert (code, errors.count("\n")) == (2, 1) and "JAVA='/nowhere/java'" in errors and not Path("runs").exists()


def test_trainer_alone_waits_for_a_gateway_and_looks_at_the_cluster(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("empo2.recipe.waiting._MINUTES", 0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, errors = cli("train", "--profile", "cpu", "--gateway", url)
    waits, ends = errors.splitlines()[-2:]
    assert code == 1 and f"waiting for a gateway at {url} (" in waits and "does not answer after 0 minutes" in ends
    looked: list[str] = []
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    nodes = [Finding("disk", "full", "empty it", "estimate")], Gpus([])
    monkeypatch.setattr(
        "empo2.recipe.preflight.cluster.look_at_cluster", lambda *_, **__: looked.append("cluster") or nodes
    )
    monkeypatch.setattr("empo2.recipe.launcher.launch.train_only", lambda *_: looked.append("trainer"))
    command = ["train", "--profile", "cpu", "--gateway", url]
    code, output, _ = cli(*command)
    assert code == 0 and looked == ["cluster", "trainer"] and "warning  disk: full; empty it (estimated)" in output
    looked.clear()
    assert cli(*command, "--run-directory", ".")[0] == 0 and looked == ["trainer"]  # the launcher has looked


def test_the_controller_has_a_key_that_agents_do_not_inherit(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    for name in ("check_gateway", "run_on_this_machine", "run_on_kubernetes"):
        monkeypatch.setattr(f"empo2.recipe.controller.run.{name}", lambda *given: started.append(given))
    monkeypatch.setenv(TRACES_VARIABLES[0], "")  # and undone at the end
    traces = "gateway.traces=http://c:4318"
    for options, concurrency in ((["--profile", "cpu", "agent.concurrency=3"], 3), (["--kubernetes", "ours"], None)):
        monkeypatch.setenv("EMPO2_KEY", "k")
        assert cli("controller", "--gateway", "http://gw:1/", *options, traces)[0] == 0
        assert "EMPO2_KEY" not in os.environ and os.environ[TRACES_VARIABLES[0]] == "http://c:4318/v1/traces"
        agent = "empo2.agents.scienceworld.agent:ScienceWorldAgent"
        wanted = ("http://gw:1", "k", agent, concurrency) if concurrency else ("http://gw:1", "k", "ours")
        assert started == [("http://gw:1", "k"), wanted]
        started.clear()
    code, _, errors = cli("controller", "--gateway", "http://gw:1")
    assert (code, started) == (2, []) and "agent.class=None" in errors
    code, _, errors = cli("controller", "--gateway", "http://gw:1", "--profile", "cpu", "agent.concurrency=0")
    assert (code, started) == (2, []) and "agent.concurrency=0: starts no agent here" in errors


def test_help_and_version(cli: Cli) -> None:
    for command in ("train", "gateway"):
        code, said, _ = cli(command, "--help")
        assert code == 0 and "tasks.args.names='[find-animal]'" in said
        assert "--run-directory" not in said and "--fd" not in said
    written = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
    assert cli("--version") == (0, f"empo2 {written}\n", "")


@pytest.mark.parametrize(("verb", "seconds"), [("gateway", 0), ("train", 1.5)])
def test_ctrl_c_during_the_imports_is_one_line(tmp_path: Path, verb: str, seconds: float) -> None:
    """As soon as our package is being imported, before which the interpreter itself is, and later in the imports."""
    command = [*CLI, verb, "--profile", "cpu"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: any("pydantic_core" in line.path for line in psutil.Process(process.pid).memory_maps()))
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (130, INTERRUPTED)


DROPS_CTRL_C = """
import os, signal, sys
from empo2.recipe import cli

umask = os.umask

def drops_ctrl_c(mask):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return umask(mask)

os.umask = drops_ctrl_c
sys.exit(cli.main())
"""


def test_ctrl_c_that_a_library_drops_is_not_lost(tmp_path: Path) -> None:
    """What C's PyObject_HasAttr does to it, done by the call with which each command begins."""
    command = [sys.executable, "-c", DROPS_CTRL_C, "train", "--profile", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, INTERRUPTED)
    assert not list(tmp_path.rglob("gateway.log"))


def name_of(process: psutil.Process) -> str:
    """Return the name of a process that runs, else nothing: it may end between any two looks."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else ""
    return ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path, number: int) -> None:
    """The real launcher with the real processes, Ray's among them, stopped while they start."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    launcher = subprocess.Popen([*CLI, "train", "--profile", "cpu", "run.name=x"], cwd=tmp_path, **pipes)
    everyone: set[psutil.Process] = set()

    def ray_is_up() -> bool:
        everyone.update(psutil.Process(launcher.pid).children(recursive=True))
        return any("raylet" in name_of(process) for process in everyone)

    try:
        until(lambda: ray_is_up() or launcher.poll() is not None, 900)
        assert launcher.poll() is None
        for _ in range(3):  # an impatient user's further signals do not cut the stopping short
            launcher.send_signal(number)
            time.sleep(0.05)
        _, errors = launcher.communicate()
    finally:
        launcher.kill()
    if number == signal.SIGINT:
        assert launcher.returncode == 130
        assert "interrupted" in errors.splitlines()[-1]
    # What a run writes is its owner's: the folder, the logs, the settings, the memory and SQLite's files beside it.
    run = tmp_path / "runs" / "x"
    assert run.stat().st_mode & 0o777 == 0o700 and not [each for each in run.rglob("*") if each.stat().st_mode & 0o077]
    assert len(everyone) >= 5
    until(lambda: not any(map(name_of, everyone)))
