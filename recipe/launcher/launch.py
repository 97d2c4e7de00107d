"""Starts gateway, controller and trainer as processes of their own, watches them, and stops exactly what it started."""

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError, ProcessError
from empo2.recipe.launcher.models import resolve_model
from empo2.recipe.launcher.run_directory import open_run_directory
from empo2.recipe.launcher.tasks import Tasks, check_agent, load_tasks
from empo2.recipe.run_folder import MEMORY_FILE, METRICS_FILE, last_checkpoint, step_of
from empo2.recipe.trainer.verl_config import build_verl_config

_STOP_SECONDS = 20
_GATEWAY_SECONDS = 120
_LOG_LINES = 15
_PR_SET_CHILD_SUBREAPER = 36


def bind(host: str, port: int) -> socket.socket:
    """A listening socket for the gateway to inherit, so that a free port stays ours.

    Raises:
        ConfigError: the port is taken or the host is not this machine's.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"gateway.port={port} on {host}: {error.strerror}; 0 takes a free one") from None
    listener.listen(1024)
    return listener


@dataclass
class Processes:
    """The processes of one run, each with its log, and everything that they start in turn."""

    directory: Path
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    interrupted: bool = False

    def start(self, name: str, command: list[str], inherit: tuple[int, ...] = ()) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                pass_fds=inherit,
                start_new_session=True,  # Ctrl-C is the launcher's to hear
            )

    def check(self) -> None:
        """Raise if the run is to end: a process is gone that should not be, or the user has asked for it.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM.
            ProcessError: names it, with the error that it printed or the end of its log.
        """
        if self.interrupted:
            raise KeyboardInterrupt
        for name, process in self.running.items():
            if process.poll() not in (None, 0) or (process.poll() == 0 and name != "trainer"):
                raise ProcessError(
                    f"{name} {_ending(process.returncode)}: {_last_words(self.directory / f'{name}.log')}"
                )

    def stop(self) -> None:
        """End everything that was started: first asked, then killed. By descent, never by name or port."""
        for process in self.running.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        # Orphans have become our own children (the launcher is their subreaper).
        while descendants := psutil.Process().children(recursive=True):
            for descendant in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendant.kill()
            psutil.wait_procs(descendants, timeout=1)
            _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    ours = [line for line in lines if line.startswith("empo2: error: ")]
    if ours:
        return ours[-1].removeprefix("empo2: error: ")
    return f"the end of {log}:\n" + "\n".join(lines[-_LOG_LINES:])


def launch(settings: Settings, profile: str | None, console: Console) -> Path:
    """Train: everything on this machine. Returns the run folder.

    Raises:
        Empo2Error: something is wrong before the start, or a process ended; nothing is left running.
    """
    started = time.monotonic()
    _check_gpus(settings)
    said = check_agent(settings)
    tasks = load_tasks(settings)
    model = _model(settings)
    # Only to refuse wrong options here: the trainer builds its own.
    build_verl_config(settings, model_path=model, run_directory=Path(), gateway_url="", gateway_key="")
    with bind(settings.gateway.host, settings.gateway.port) as listener:
        directory, resumed = open_run_directory(settings, profile)
        (directory / "tasks.json").write_text(json.dumps(asdict(tasks), indent=1))
        host, port = listener.getsockname()[:2]
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        key = settings.gateway.key or os.environ.get("EMPO2_KEY") or secrets.token_urlsafe(24)
        console.print(f"run    {directory}\nmodel  {model}", soft_wrap=True, highlight=False)
        if resumed is not None:
            console.print(f"resume after step {step_of(resumed)}, with the memory of that step", highlight=False)
        if said:
            console.print(f"agent  {said}", soft_wrap=True, highlight=False)
        console.print(f"tasks  {len(tasks.train)} for training, {len(tasks.val)} for validation", highlight=False)

        environment = {**os.environ, "EMPO2_KEY": key, "PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()}
        processes = Processes(directory, environment)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with _noting_signals(processes):
            try:
                cli = [sys.executable, "-m", "empo2.recipe.cli"]
                config = ["--config", str(directory / "config.yaml")]
                processes.start(
                    "trainer", [*cli, "train", *config, "--gateway", url, "--run-directory", str(directory)]
                )
                processes.start(
                    "gateway",
                    [
                        *cli,
                        "gateway",
                        *config,
                        "--fd",
                        str(listener.fileno()),
                        "--memory",
                        str(directory / MEMORY_FILE),
                    ],
                    inherit=(listener.fileno(),),
                )
                _wait_for_gateway(url, processes)
                processes.start("controller", _controller(settings, url))
                _watch(settings, url, key, directory, processes, console, started)
            finally:
                processes.stop()
    return directory


def _check_gpus(settings: Settings) -> None:
    if settings.hardware.device == "gpu":
        import torch

        wanted, present = settings.hardware.gpus_per_node, torch.cuda.device_count()
        if present < wanted:
            raise ConfigError(
                f"hardware.gpus_per_node={wanted}: this machine has {present}; --profile cpu needs none, gpu-1 one"
            )


def _python_path() -> str:
    """The user's agents may lie in the current folder, which only a script's own interpreter searches."""
    return os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))


def _model(settings: Settings) -> str:
    try:
        return str(resolve_model(settings.model.path))
    except OSError as error:
        raise ConfigError(f"model.path: {error}") from None


def _controller(settings: Settings, url: str) -> list[str]:
    code = "from agentlightning.controller.__main__ import main; main()"
    return [
        sys.executable,
        "-c",
        code,
        "runner_type=local",
        f"agl_server.url={url}",
        "agl_server.key=${oc.env:EMPO2_KEY}",  # not on the command line, where everyone could read it
        f"local_runner.maximum_size={settings.agent.concurrency}",
        "local_runner.poll_interval=0.5",
        "hydra.output_subdir=null",
        "hydra.run.dir=.",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]


def _wait_for_gateway(url: str, processes: Processes) -> None:
    deadline = time.monotonic() + _GATEWAY_SECONDS
    while True:
        processes.check()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/healthz", timeout=5).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise ProcessError(f"gateway does not answer at {url} after {_GATEWAY_SECONDS} s")
        time.sleep(0.2)


def _watch(
    settings: Settings, url: str, key: str, directory: Path, processes: Processes, console: Console, started: float
) -> None:
    """Show progress until the trainer is done."""
    lines = _metrics(directory / METRICS_FILE)
    with (
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=10) as client,
        _progress(console, settings.run.steps) as show,
    ):
        first_rollout = None
        show("loading verl and vLLM", None)
        while True:
            processes.check()
            ended = processes.running["trainer"].poll() == 0
            for metrics in iter(lambda: next(lines), None):
                show(_sentence(metrics), metrics["step"])
            if ended:
                return
            with contextlib.suppress(httpx.HTTPError):
                if first_rollout is None and client.get("/api/rollouts?state_in=running&limit=1").json():
                    first_rollout = time.monotonic() - started
                    show(f"first rollout {first_rollout:.0f} s after the start", None)
            time.sleep(0.5)


def _metrics(file: Path) -> Iterator[dict[str, Any] | None]:
    """The lines that a file grows by; None whenever there is no further whole line yet."""
    begin = file.stat().st_size if file.exists() else 0
    yield None
    while not file.exists():
        yield None
    with file.open() as stream:
        stream.seek(begin)
        part = ""
        while True:
            part += stream.readline()
            if part.endswith("\n"):
                yield json.loads(part)
                part = ""
            else:
                yield None


def _sentence(metrics: dict[str, Any]) -> str:
    parts = []
    if "training/return" in metrics:
        memory, off_policy = metrics["empo2/memory_fraction"], metrics["empo2/off_policy_fraction"]
        mode = "off-policy" if off_policy else "memory" if memory else "no memory"
        parts.append(
            f"return {metrics['training/return']:7.2f}  {mode:10}  {metrics['empo2/memory_size']:.0f} tips"
            f"  {metrics.get('timing_s/step', 0):.0f} s"
        )
        for key in ("rollouts_dropped", "memory_failures"):
            if metrics.get(f"empo2/{key}"):
                parts.append(f"{metrics[f'empo2/{key}']:.0f} {key.replace('_', ' ')}")
    if metrics.get("val/return") is not None:
        parts.append(f"validation {metrics['val/return']:.2f}")
    return "  ".join(parts)


@contextlib.contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[[str, int | None], None]]:
    """A bar on a terminal, a line a step elsewhere."""
    if not console.is_terminal:
        yield lambda text, step: console.print(f"step {step}/{steps}  {text}" if step is not None else text)
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps)
        yield lambda text, step: progress.update(task, description=text, completed=step)


@contextlib.contextmanager
def _noting_signals(processes: Processes) -> Iterator[None]:
    """Ctrl-C and SIGTERM are noted, for ``Processes.check`` to raise: none can cut short the stopping itself."""

    def note(number: int, frame: Any) -> None:
        processes.interrupted = True

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def train_only(settings: Settings, url: str, key: str, directory: Path) -> None:
    """The trainer alone, in this process, against a gateway that runs elsewhere.

    Raises:
        Empo2Error: as ``empo2.recipe.run_empo2`` does.
    """
    file = directory / "tasks.json"
    tasks = Tasks(**json.loads(file.read_text())) if file.exists() else load_tasks(settings)
    model = _model(settings)
    if settings.hardware.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # hides GPUs from compat/, and is the one that Ray is told of
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings.hardware.kv_cache))

    from empo2.recipe import run_empo2

    config = build_verl_config(
        settings,
        model_path=model,
        run_directory=directory,
        gateway_url=url,
        gateway_key=key,
        resume_from=last_checkpoint(directory / "checkpoints"),
    )
    run_empo2(config, tasks.train, tasks.val)
