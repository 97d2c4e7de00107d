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
from empo2.recipe.files.models import model_of
from empo2.recipe.files.run_directory import how_to_resume, last_set_aside, open_run_directory
from empo2.recipe.files.tasks import Tasks, check_agent, load_tasks
from empo2.recipe.files.tool_calls import tool_support
from empo2.recipe.gateway.stages.untrained import choice_of
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.launcher import commands
from empo2.recipe.launcher.processes import ending_descendants, running
from empo2.recipe.launcher.progress import RunProgress
from empo2.recipe.launcher.watch import Watch
from empo2.recipe.marked_lines import STAGES
from empo2.recipe.network import bind, gateway_host
from empo2.recipe.preflight.cluster import require_cluster
from empo2.recipe.preflight.machine import require_room
from empo2.recipe.printed import printable
from empo2.recipe.protocol import scope_of
from empo2.recipe.rollout_log import read_dropped, rollout_files
from empo2.recipe.run_folder import CHECKPOINTS, ROLLOUTS, TASKS_FILE, last_checkpoint, step_of
from empo2.recipe.scopes import recurrence_warning
from empo2.recipe.trainer.verl_config import build_verl_config

_RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_ANSWER_SECONDS = 3  # while the gateway is silent, nobody looks whether the processes live


Check = Callable[[Settings, Tasks, str], None]


@ending_descendants()  # such as a world that lists its tasks
def launch(settings: Settings, profile: str | None, console: Console, *, check: Check | None = None) -> Path:
    """Train with all processes on this machine; return the run's folder.

    Args:
        check: one more check before anything starts, of settings, tasks and the model's folder or name.

    Raises:
        Empo2Error: a check failed or a process ended; nothing is left running.
        KeyboardInterrupt: the user interrupted the run; nothing is left running.
    """
    started = time.monotonic()
    if settings.model.server is not None:
        raise ConfigError(f"model.server={settings.model.server!r}: training starts its own vLLM; set it to null")
    room = require_room(settings) if settings.hardware.cluster is None else []
    if not settings.agent.concurrency and not commands.given_keys().agent:
        raise ConfigError(f"agent.concurrency=0: controllers of other hosts need a key; give it as {commands.KEY}")
    agent = check_agent(settings)
    choice_of(settings.gateway.trained_calls)  # refuses what cannot be imported
    traces_endpoint(settings)  # refuses another protocol
    tasks = load_tasks(settings)
    StateReader(settings.memory)  # refuses a function that cannot be imported
    model = model_of(settings)
    # Refuses wrong options; the trainer builds its own configuration.
    build_verl_config(settings, model_path=model, run_directory=Path(), gateway_url="", gateway_key="")

    def say(text: str) -> None:
        console.print(printable(text), soft_wrap=True, highlight=False, markup=False)

    if settings.hardware.cluster is not None:
        room = require_cluster(settings, model, say)
    scopes = [scope_of(task, settings.memory.scope) for task in tasks.train]
    if check is not None:
        check(settings, tasks, model)
    recurrence = recurrence_warning(scopes, settings, settings.run.steps)
    for warning in filter(None, [*room, *warnings_of(settings), recurrence]):
        say(f"warning  {warning}")
    with bind(gateway_host(settings), settings.gateway.port) as listener:
        url = commands.url_of(listener)
        directory, resumed = open_run_directory(settings, profile)
        (directory / TASKS_FILE).write_text(json.dumps(asdict(tasks), indent=1))
        say(f"run    {directory}\nmodel  {model}")
        if (left := last_set_aside(directory)) is not None:
            say(f"kept   {left}: what the start before this one left")
            before = left / TASKS_FILE
            if resumed is not None and before.is_file() and before.read_text() != (directory / TASKS_FILE).read_text():
                say(f"warning  the tasks are not those that the run had so far, which are in {before}")
        done = step_of(resumed) if resumed else 0
        if resumed is not None:
            say(f"resume after step {done}, with the memory of that step")
        if not settings.agent.concurrency:
            say(f"play   other hosts, with the gateway {url}")
        if agent:
            say(f"agent  {agent}")
        say(f"tasks  {len(tasks.train)} for training, {len(tasks.val)} for validation")

        keys, watch = commands.given_or_random_keys(), Watch(directory)
        try:
            with (
                running(directory, commands.environment_without(*_RAY_TOKEN)) as processes,  # agents need no Ray
                commands.settings_descriptor(settings) as descriptor,
                RunProgress(console, settings.run.steps, done=done, started=started) as shown,
            ):
                shown.loading(STAGES[0])
                trainer = _trainer(directory, descriptor, url)
                token = {name: os.environ[name] for name in _RAY_TOKEN if name in os.environ}
                secrets = {commands.ADMIN_KEY: keys.admin, **token}
                processes.start("trainer", trainer, secrets=secrets, inherit=(descriptor,), may_end=True, saves=True)
                commands.start_gateway(processes, directory, descriptor, listener, keys, restartable=True)
                commands.wait_for(f"{url}/healthz", partial(watch.look, processes, shown))
                if settings.agent.concurrency:
                    commands.start_controller(processes, settings, url, keys)
                headers = {"Authorization": f"Bearer {keys.admin}"}
                with httpx.Client(base_url=url, headers=headers, timeout=_ANSWER_SECONDS) as client:
                    watch.until_done(client, processes, shown)
        except Preempted as end:
            _say_rollouts(directory, say)
            raise Preempted(f"{end}; {how_to_resume(directory).removeprefix('resume').strip()}") from None
        except (ProcessError, KeyboardInterrupt):
            _say_rollouts(directory, say)
            say(how_to_resume(directory))
            raise
        _say_rollouts(directory, say)
    return directory


def _say_rollouts(directory: Path, say: Callable[[str], object]) -> None:
    """Say why rollouts of the run were dropped, one line for each cause, and what those that are kept take."""
    with contextlib.suppress(Empo2Error):  # the run's own end matters more
        for dropped in read_dropped(directory / ROLLOUTS):
            say(f"dropped  {dropped.told(directory)}")
    if files := rollout_files(directory / ROLLOUTS):
        size = sum(file.stat().st_size for file in files) / 1e6
        say(f"rollouts  {size:.1f} MB in {directory / ROLLOUTS}; empo2 show {directory}")


def train_only(settings: Settings, url: str, key: str, directory: Path) -> None:
    """Run the trainer alone, in this process, against the gateway at ``url``."""
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


def _trainer(directory: Path, descriptor: int, url: str) -> list[str]:
    return [*commands.empo2_command("train", descriptor), "--gateway", url, "--run-directory", str(directory)]
