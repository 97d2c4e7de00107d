"""Launch a training run: check the settings, start gateway, controller and trainer, watch them, and stop them."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console

from empo2.recipe.config import Settings, traces_endpoint, warnings_of
from empo2.recipe.errors import ConfigError, Empo2Error, Preempted, ProcessError
from empo2.recipe.gateway.stages.untrained import choice_of
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.launcher.cluster import require_cluster
from empo2.recipe.launcher.commands import (
    ADMIN_KEY,
    KEY,
    empo2_command,
    environment_without,
    given_keys,
    given_or_random_keys,
    in_memory,
    start_controller,
    start_gateway,
    url_of,
    wait_for,
)
from empo2.recipe.launcher.machine import require_room
from empo2.recipe.launcher.model_files import model_of
from empo2.recipe.launcher.processes import bind, ending_descendants, running
from empo2.recipe.launcher.progress import RunProgress
from empo2.recipe.launcher.run_directory import how_to_resume, last_set_aside, open_run_directory
from empo2.recipe.launcher.tasks import Tasks, check_agent, load_tasks
from empo2.recipe.launcher.tool_calls import tool_support
from empo2.recipe.launcher.watch import Watch
from empo2.recipe.marked_lines import STAGES
from empo2.recipe.network import gateway_host
from empo2.recipe.protocol import scope_of
from empo2.recipe.rollout_log import read_dropped, rollout_files
from empo2.recipe.run_folder import CHECKPOINTS, ROLLOUTS, TASKS_FILE, last_checkpoint, step_of
from empo2.recipe.scopes import recurrence_warning
from empo2.recipe.trainer.verl_config import build_verl_config

_RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_ANSWER_SECONDS = 3  # while the gateway is silent, nobody looks whether the processes live


Check = Callable[[Settings, Tasks, str], None]


def launch(settings: Settings, profile: str | None, console: Console, *, check: Check | None = None) -> Path:
    """Train with all processes on this machine; return the run's folder.

    Args:
        check: one more check before anything starts, of settings, tasks and the model's folder or name.

    Raises:
        Empo2Error: a check failed or a process ended; nothing is left running.
        KeyboardInterrupt: the user interrupted the run; nothing is left running.
    """
    with ending_descendants():  # such as a world that lists its tasks
        return _launch(settings, profile, console, check)


def _launch(settings: Settings, profile: str | None, console: Console, check: Check | None) -> Path:
    started = time.monotonic()
    if settings.model.server is not None:
        raise ConfigError(f"model.server={settings.model.server!r}: training starts its own vLLM; set it to null")
    room = require_room(settings) if settings.hardware.cluster is None else []
    if not settings.agent.concurrency and not given_keys().agent:
        raise ConfigError(f"agent.concurrency=0: the controllers of other hosts need the agents' key; give it as {KEY}")
    agent = check_agent(settings)
    choice_of(settings.gateway.trained_calls)  # refuses what cannot be imported
    traces_endpoint(settings)  # refuses another protocol
    tasks = load_tasks(settings)
    StateReader(settings.memory)  # refuses a function that cannot be imported
    model = model_of(settings)
    # Refuses wrong options before anything starts; the trainer builds its own configuration.
    build_verl_config(settings, model_path=model, run_directory=Path(), gateway_url="", gateway_key="")
    if settings.hardware.cluster is not None:
        room = require_cluster(settings, model, partial(console.print, soft_wrap=True, highlight=False, markup=False))
    scopes = [scope_of(task, settings.memory.scope) for task in tasks.train]
    if check is not None:
        check(settings, tasks, model)
    recurrence = recurrence_warning(scopes, settings, settings.run.steps)
    for warning in filter(None, [*room, *warnings_of(settings), recurrence]):
        console.print(f"warning  {warning}", soft_wrap=True, highlight=False, markup=False)
    with bind(gateway_host(settings), settings.gateway.port) as listener:
        url = url_of(listener)
        directory, resumed = open_run_directory(settings, profile)
        (directory / TASKS_FILE).write_text(json.dumps(asdict(tasks), indent=1))
        console.print(f"run    {directory}\nmodel  {model}", soft_wrap=True, highlight=False)
        if (left := last_set_aside(directory)) is not None:
            console.print(f"kept   {left}: what the start before this one left", soft_wrap=True, highlight=False)
        if resumed is not None:
            console.print(f"resume after step {step_of(resumed)}, with the memory of that step", highlight=False)
        if not settings.agent.concurrency:
            console.print(f"play   other hosts, with the gateway {url}", soft_wrap=True, highlight=False)
        if agent:
            console.print(f"agent  {agent}", soft_wrap=True, highlight=False)
        console.print(f"tasks  {len(tasks.train)} for training, {len(tasks.val)} for validation", highlight=False)

        keys = given_or_random_keys()
        steps, done = settings.run.steps, step_of(resumed) if resumed else 0
        watch = Watch(directory)
        try:
            with (
                running(directory, environment_without(*_RAY_TOKEN)) as processes,  # agents have no business in Ray
                in_memory(settings) as file,
                RunProgress(console, steps, done=done, started=started) as shown,
            ):
                shown.loading(STAGES[0])
                trainer = _trainer(directory, file, url)
                token = {name: os.environ[name] for name in _RAY_TOKEN if name in os.environ}
                secrets = {ADMIN_KEY: keys.admin, **token}
                processes.start("trainer", trainer, secrets=secrets, inherit=(file,), may_end=True, saves=True)
                start_gateway(processes, directory, file, listener, keys)
                wait_for(f"{url}/healthz", partial(watch.look, processes, shown))
                if settings.agent.concurrency:
                    start_controller(processes, settings, url, keys)
                headers = {"Authorization": f"Bearer {keys.admin}"}
                with httpx.Client(base_url=url, headers=headers, timeout=_ANSWER_SECONDS) as client:
                    watch.until_done(client, processes, shown)
        except Preempted as end:
            _say_rollouts(directory, console)
            raise Preempted(f"{end}; {how_to_resume(directory).removeprefix('resume').strip()}") from None
        except (ProcessError, KeyboardInterrupt):
            _say_rollouts(directory, console)
            console.print(how_to_resume(directory), soft_wrap=True, highlight=False, markup=False)
            raise
        _say_rollouts(directory, console)
    return directory


def _say_rollouts(directory: Path, console: Console) -> None:
    """Print why rollouts of the run were dropped, one line for each cause, and what those that are kept take."""
    said = []
    with contextlib.suppress(Empo2Error):  # the run's own end matters more
        said = [f"dropped  {dropped.told(directory)}" for dropped in read_dropped(directory / ROLLOUTS)]
    if files := rollout_files(directory / ROLLOUTS):
        size = sum(file.stat().st_size for file in files) / 1e6
        said.append(f"rollouts  {size:.1f} MB in {directory / ROLLOUTS}; empo2 show {directory}")
    for line in said:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


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
        tool_parser=tool_support(settings.model, model).parser,
        resume_from=last_checkpoint(directory / CHECKPOINTS),
    )
    run_empo2(config, tasks.train, tasks.val)


def _trainer(directory: Path, settings: int, url: str) -> list[str]:
    return [*empo2_command("train", settings), "--gateway", url, "--run-directory", str(directory)]
