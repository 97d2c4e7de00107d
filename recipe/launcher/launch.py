"""Launch a training run: check the settings, start gateway, controller and trainer, watch them, and stop them."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from empo2.recipe.config import Settings
from empo2.recipe.errors import Empo2Error, Preempted, ProcessError
from empo2.recipe.files.models import model_of
from empo2.recipe.files.run_directory import how_to_resume, last_set_aside, open_run_directory
from empo2.recipe.files.tasks import Tasks, load_tasks
from empo2.recipe.files.tool_calls import tool_support
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.launcher import commands
from empo2.recipe.launcher.processes import ending_descendants, running
from empo2.recipe.launcher.progress import RunProgress
from empo2.recipe.launcher.watch import Watch
from empo2.recipe.marked_lines import STAGES
from empo2.recipe.network import bind, gateway_host
from empo2.recipe.preflight.checks import FETCHED, MACHINE, SETTINGS, require
from empo2.recipe.preflight.cluster import WAIT_SECONDS
from empo2.recipe.preflight.start import Start
from empo2.recipe.printed import printable
from empo2.recipe.rollout_log import read_dropped, rollout_files
from empo2.recipe.run_folder import CHECKPOINTS, ROLLOUTS, TASKS_FILE, last_checkpoint, step_of
from empo2.recipe.trainer.verl_config import build_verl_config

_RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@ending_descendants()  # such as a world that lists its tasks
def launch(settings: Settings, profile: str | None, console: Console) -> Path:
    """Train with all processes on this machine; return the run's folder.

    Raises:
        Empo2Error: a check of the preflight failed or a process ended; nothing is left running.
        KeyboardInterrupt: the user interrupted the run; nothing is left running.
    """
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(printable(text), soft_wrap=True, highlight=False, markup=False)

    start = Start(settings, say=say, seconds=WAIT_SECONDS)
    for warning in require(start, SETTINGS, MACHINE, FETCHED):
        say(f"warning  {warning}")
    tasks, model = start.tasks, start.model
    with bind(gateway_host(settings), settings.gateway.port) as listener:
        url = commands.url_of(listener)
        directory, resumed = open_run_directory(settings, profile)
        say(f"run    {directory}\nmodel  {model}")
        (directory / TASKS_FILE).write_text(json.dumps(asdict(tasks), indent=1))
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
        if start.agent:
            say(f"agent  {start.agent}")
        say(f"tasks  {len(tasks.train)} for training, {len(tasks.val)} for validation")

        keys = commands.given_or_random_keys()
        environment = commands.environment_without(*_RAY_TOKEN, url=url)  # agents need no Ray
        try:
            with (
                running(directory, environment) as processes,
                commands.settings_descriptor(settings) as descriptor,
                RunProgress(console, settings.run.steps, done=done, started=started) as shown,
            ):
                watch = Watch(processes, shown)
                shown.loading(STAGES[0])
                trainer = [*commands.empo2_command("train", descriptor), "--gateway", url]
                trainer += ["--run-directory", str(directory)]
                token = {name: os.environ[name] for name in _RAY_TOKEN if name in os.environ}
                secrets = {commands.ADMIN_KEY: keys.admin, **token}
                processes.start("trainer", trainer, secrets=secrets, inherit=(descriptor,), trains=True)
                commands.start_gateway(processes, descriptor, listener, keys, restartable=True)
                commands.wait_for(f"{url}/healthz", watch.look)
                if settings.agent.concurrency:
                    commands.start_controller(processes, settings, url, keys)
                with contextlib.closing(GatewayClient(url, keys.admin)) as gateway:
                    watch.until_done(gateway)
        except Preempted as end:
            _say_rollouts(directory, say)
            raise Preempted(f"{end}; {how_to_resume(directory)}") from None
        except (ProcessError, KeyboardInterrupt):
            _say_rollouts(directory, say)
            say(f"resume  {how_to_resume(directory)}")
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

    from empo2.recipe.trainer.start import start

    config = build_verl_config(
        settings,
        model_path=model,
        run_directory=directory,
        gateway_url=url,
        gateway_key=key,
        tool_parser=tool_support(settings.model, model).parser,
        resume_from=last_checkpoint(directory / CHECKPOINTS),
    )
    start(config, tasks.train, tasks.val)
