"""Launch a training run: check the settings, start gateway, controller and trainer, watch them, and stop them."""

import contextlib
import json
import os
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path

import httpx
from rich.console import Console

from empo2.recipe.config import Settings, warnings_of
from empo2.recipe.errors import ConfigError, ProcessError
from empo2.recipe.launcher.models import resolve_model
from empo2.recipe.launcher.processes import Processes, bind, running
from empo2.recipe.launcher.progress import NewMetrics, progress, step_summary
from empo2.recipe.launcher.run_directory import open_run_directory
from empo2.recipe.launcher.tasks import Tasks, check_agent, load_tasks
from empo2.recipe.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    TASKS_FILE,
    last_checkpoint,
    step_of,
)
from empo2.recipe.trainer.verl_config import build_verl_config

_GATEWAY_SECONDS = 120
_POLL_SECONDS = 0.5


def launch(settings: Settings, profile: str | None, console: Console) -> Path:
    """Train with all processes on this machine; return the run's folder.

    Raises:
        Empo2Error: a check failed or a process ended; nothing is left running.
        KeyboardInterrupt: the user interrupted the run; nothing is left running.
    """
    started = time.monotonic()
    if settings.model.server is not None:
        raise ConfigError(f"model.server={settings.model.server!r}: training starts its own vLLM; set it to null")
    check_gpus(settings)
    agent = check_agent(settings)
    tasks = load_tasks(settings)
    model = model_of(settings)
    # Refuses wrong options before anything starts; the trainer builds its own configuration.
    build_verl_config(settings, model_path=model, run_directory=Path(), gateway_url="", gateway_key="")
    for warning in warnings_of(settings):
        console.print(f"warning  {warning}", soft_wrap=True, highlight=False, markup=False)
    with bind(settings.gateway.host, settings.gateway.port) as listener:
        directory, resumed = open_run_directory(settings, profile)
        (directory / TASKS_FILE).write_text(json.dumps(asdict(tasks), indent=1))
        console.print(f"run    {directory}\nmodel  {model}", soft_wrap=True, highlight=False)
        if resumed is not None:
            console.print(f"resume after step {step_of(resumed)}, with the memory of that step", highlight=False)
        if agent:
            console.print(f"agent  {agent}", soft_wrap=True, highlight=False)
        console.print(f"tasks  {len(tasks.train)} for training, {len(tasks.val)} for validation", highlight=False)

        host, port = listener.getsockname()[:2]
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        key = settings.gateway.key or os.environ.get("EMPO2_KEY") or secrets.token_urlsafe(24)
        environment = {**os.environ, "EMPO2_KEY": key, "PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path()}
        with running(directory, environment) as processes:
            processes.start("trainer", _trainer(directory, url))
            processes.start("gateway", gateway_command(directory, listener.fileno()), inherit=(listener.fileno(),))
            wait_for_gateway(url, processes)
            processes.start("controller", controller_command(settings, url))
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=10) as client:
                _watch(settings.run.steps, client, directory / METRICS_FILE, processes, console, started)
    return directory


def train_only(settings: Settings, url: str, key: str, directory: Path) -> None:
    """Run the trainer alone, in this process, against the gateway at ``url``.

    Raises:
        Empo2Error: as ``empo2.recipe.run_empo2`` does.
    """
    file = directory / TASKS_FILE
    tasks = Tasks(**json.loads(file.read_text())) if file.exists() else load_tasks(settings)
    model = model_of(settings)
    if settings.hardware.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # compat/ hides GPUs by it, and Ray passes it to its workers
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings.hardware.kv_cache))

    from empo2.recipe import run_empo2

    config = build_verl_config(
        settings,
        model_path=model,
        run_directory=directory,
        gateway_url=url,
        gateway_key=key,
        resume_from=last_checkpoint(directory / CHECKPOINTS),
    )
    run_empo2(config, tasks.train, tasks.val)


def check_gpus(settings: Settings) -> None:
    if settings.hardware.device == "gpu":
        import torch

        wanted, present = settings.hardware.gpus_per_node, torch.cuda.device_count()
        if present < wanted:
            raise ConfigError(
                f"hardware.gpus_per_node={wanted}: this machine has {present}; --profile cpu needs none, gpu-1 one"
            )


def model_of(settings: Settings) -> str:
    try:
        return str(resolve_model(settings.model.path))
    except OSError as error:
        raise ConfigError(f"model.path: {error}") from None


def python_path() -> str:
    """Return PYTHONPATH with the current folder, which may hold the user's agents; console scripts do not search it."""
    return os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))


def _trainer(directory: Path, url: str) -> list[str]:
    return [*_empo2("train", directory), "--gateway", url, "--run-directory", str(directory)]


def gateway_command(directory: Path, listener: int) -> list[str]:
    return [*_empo2("gateway", directory), "--fd", str(listener), "--memory", str(directory / MEMORY_FILE)]


def _empo2(verb: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "empo2.recipe.cli", verb, "--config", str(directory / CONFIG_FILE)]


def controller_command(settings: Settings, url: str) -> list[str]:
    code = "from agentlightning.controller.__main__ import main; main()"
    return [
        sys.executable,
        "-c",
        code,
        "runner_type=local",
        f"agl_server.url={url}",
        "agl_server.key=${oc.env:EMPO2_KEY}",  # not on the command line, which every user of the machine can read
        f"local_runner.maximum_size={settings.agent.concurrency}",
        "local_runner.poll_interval=0.5",
        "hydra.output_subdir=null",
        "hydra.run.dir=.",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]


def wait_for_gateway(url: str, processes: Processes) -> None:
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
    steps: int, client: httpx.Client, metrics_file: Path, processes: Processes, console: Console, started: float
) -> None:
    """Show progress until the trainer is done."""
    new, first_rollout = NewMetrics(metrics_file), None
    with progress(console, steps) as show:
        show("loading verl and vLLM", None)
        while True:
            processes.check()
            done = processes.done("trainer")
            for metrics in new.read():
                show(step_summary(metrics), metrics["step"])
            if done:
                return
            with contextlib.suppress(httpx.HTTPError):
                if first_rollout is None and client.get("/api/rollouts?state_in=running&limit=1").json():
                    first_rollout = time.monotonic() - started
                    show(f"first rollout {first_rollout:.0f} s after the start", None)
            time.sleep(_POLL_SECONDS)
