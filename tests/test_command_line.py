"""Wrong input: one clear line, the right exit code, nothing started. And processes: nothing left running."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from empo2.recipe.errors import ProcessError
from empo2.recipe.launcher.launch import Processes

CLI = [sys.executable, "-m", "empo2.recipe.cli"]


def run_cli(*arguments: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments],
        cwd=directory,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["algorithm.sed=1"], ["algorithm.sed=1", "did you mean algorithm.seed?"]),
        (["algorithm.seed=x"], ["algorithm.seed='x'", "integer"]),
        (["algorithm.memory_probability=1.5"], ["algorithm.memory_probability=1.5", "less than or equal to 1"]),
        (["algorithm.name=ppo"], ["algorithm.name='ppo'", "'empo2' or 'grpo'"]),
        (["verl.trainer.foo=1"], ["verl.trainer.foo=1"]),
        (["tasks.args.names=[find-animals]"], ["find-animals", "find-animal"]),
        (["tasks.args.train_variations=0"], ["train_variations"]),
        (["tasks.args.nonsense=1"], ["nonsense"]),
        (["agent.class=empo2.agents.scienceworld.agent:Nobody"], ["agent.class", "Nobody"]),
        (["agent.class=no_such_module:Agent"], ["agent.class", "no_such_module"]),
        (["agent.class=empo2.agents.scienceworld.agent:Outcome"], ["agent.class", "run()"]),
        (["model.path=./no/such/model"], ["model.path", "no/such/model"]),
        (["memory.scope=[task,planet]"], ["memory.scope", "planet", "variation"]),
        (["--profile", "gpu-1"], ["hardware.gpus_per_node=1", "--profile cpu"]),
        (["--profile", "tpu"], ["profile 'tpu'", "cpu"]),
        (["nonsense"], ["nonsense", "key=value"]),
    ],
)
def test_wrong_settings_are_one_line(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    if "gpu-1" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    profile = [] if "--profile" in arguments else ["--profile", "cpu"]
    done = run_cli("train", *profile, *arguments, directory=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("empo2: error: ")
    assert all(word in line for word in words), line
    assert not (tmp_path / "runs").exists()


def test_missing_java(tmp_path: Path) -> None:
    done = run_cli("train", "--profile", "cpu", directory=tmp_path, JAVA="/nowhere/java")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "JAVA='/nowhere/java'" in line


def test_run_folder_exists(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    done = run_cli("train", "--profile", "cpu", "run.name=mine", directory=tmp_path)
    assert done.returncode == 2
    assert "run.name='mine'" in done.stderr and done.stderr.count("\n") == 1
    assert list((tmp_path / "runs" / "mine").iterdir()) == []


@pytest.mark.parametrize("command", ["train", "gateway"])
def test_port_taken(tmp_path: Path, command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_cli(command, "--profile", "cpu", f"gateway.port={port}", directory=tmp_path)
    assert done.returncode == 2
    assert f"gateway.port={port}" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_gateway_that_others_can_reach_needs_a_key(tmp_path: Path) -> None:
    done = run_cli("gateway", "--profile", "cpu", "gateway.host=0.0.0.0", directory=tmp_path, EMPO2_KEY="")
    assert done.returncode == 2
    assert "gateway.host=0.0.0.0" in done.stderr and "--key" in done.stderr


def test_trainer_alone_without_a_gateway(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    done = run_cli("train", "--profile", "cpu", "--gateway", url, directory=tmp_path)
    assert done.returncode == 1
    assert f"no gateway answers at {url}" in done.stderr.splitlines()[-1]


def test_help_teaches(tmp_path: Path) -> None:
    for command in ("train", "gateway"):
        done = run_cli(command, "--help", directory=tmp_path)
        assert done.returncode == 0
        assert "config.yaml" in done.stdout and "algorithm.memory_probability=0.5" in done.stdout
    assert run_cli(directory=tmp_path).returncode == 2


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_run_leaves_nothing(tmp_path: Path, number: int) -> None:
    """The real launcher with the real processes, Ray's among them, stopped while they start."""
    launcher = subprocess.Popen(
        [*CLI, "train", "--profile", "cpu", "run.name=x"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    everyone: set[psutil.Process] = set()

    def ray_is_up() -> bool:
        everyone.update(psutil.Process(launcher.pid).children(recursive=True))
        return any("raylet" in process.name() for process in everyone if process.is_running())

    try:
        wait_for(ray_is_up, 120)
        for _ in range(3):  # an impatient user's further signals must not cut the stopping short
            launcher.send_signal(number)
            time.sleep(0.05)
        _, errors = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 130
    assert "interrupted" in errors.splitlines()[-1]
    assert len(everyone) >= 5
    wait_for(lambda: not [p for p in everyone if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], 10)


def test_a_process_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    processes = Processes(tmp_path, dict(os.environ))
    try:
        processes.start("gateway", [sys.executable, "-c", "import time; time.sleep(100)"])
        processes.check()
        processes.start("controller", [sys.executable, "-c", "print('out of luck'); raise SystemExit(7)"])
        processes.running["controller"].wait()
        with pytest.raises(ProcessError, match=r"(?s)controller ended with exit code 7: .*out of luck"):
            processes.check()
        processes.running["gateway"].kill()
        processes.running["gateway"].wait()
        del processes.running["controller"]
        with pytest.raises(ProcessError, match="gateway was ended by SIGKILL"):
            processes.check()
    finally:
        for process in processes.running.values():
            process.kill()
            process.wait()


def test_a_process_that_explains_itself_is_quoted(tmp_path: Path) -> None:
    processes = Processes(tmp_path, dict(os.environ))
    code = "import sys; print('noise'); print('empo2: error: the disk is full'); print('more'); sys.exit(1)"
    processes.start("trainer", [sys.executable, "-c", code])
    processes.running["trainer"].wait()
    with pytest.raises(ProcessError) as caught:
        processes.check()
    assert str(caught.value) == "trainer ended with exit code 1: the disk is full"


def test_stop_ends_children_of_children_that_ignore_it(tmp_path: Path) -> None:
    """Run apart: the launcher makes itself the subreaper of everything below it."""
    code = """
import ctypes, os, subprocess, sys, time, psutil
from pathlib import Path
from empo2.recipe.launcher.launch import Processes
ctypes.CDLL(None).prctl(36, 1)
child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
processes = Processes(Path(sys.argv[1]), dict(os.environ))
processes.start("trainer", [sys.executable, "-c", parent])
while "up" not in Path(sys.argv[1], "trainer.log").read_text():
    time.sleep(0.05)
assert psutil.Process().children(recursive=True)
processes.stop()
assert not psutil.Process().children(recursive=True)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
