"""Train the trials of a sweep, one after another; each can be interrupted and goes on from its last checkpoint."""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import yaml

from empo2.recipe.config import NO_RESULT
from empo2.recipe.errors import ConfigError, ProcessError
from empo2.recipe.files.plan import Trial
from empo2.recipe.launcher.commands import empo2_command, settings_descriptor
from empo2.recipe.launcher.processes import running
from empo2.recipe.launcher.progress import NewLines, step_summary
from empo2.recipe.redaction import redacted
from empo2.recipe.run_folder import CONFIG_FILE, METRICS_FILE, read_lines

type Show = Callable[[str], None]  # shows a line of progress
type Command = Callable[[int], list[str]]
type Look = Callable[[int, int | None], object]

_COMPARED = ("algorithm", "model", "agent", "tasks", "memory", "reflection")
_EMPO2_TRAIN = partial(empo2_command, "train")
_POLL_SECONDS = 1


def train_all(trials: Sequence[Trial], folder: Path, show: Show, command: Command = _EMPO2_TRAIN) -> dict[str, str]:
    """Train all trials that have not ended yet, whichever of them fail; return why trials failed, by name."""
    failed = {}
    for number, trial in enumerate(trials, 1):
        place = f"run {number} of {len(trials)}  {trial.name}"
        if has_ended(trial, folder):
            show(f"{place}  has ended before")
            continue
        show(f"{place}  begins; its log is {folder / trial.name}.log")
        try:
            train(trial, folder, lambda text, place=place: show(f"{place}  {text}"), command)
        except ProcessError as error:
            failed[trial.name] = str(error)
            show(f"{place}  failed: {error}")
    return failed


def check_settings(trials: Sequence[Trial], folder: Path) -> None:
    """Refuse to go on with runs that began with other settings; how long and where they run may change."""
    for trial in trials:
        file = folder / trial.name / CONFIG_FILE
        before = yaml.safe_load(file.read_text()) if file.is_file() else {}
        now = redacted(trial.settings.to_dict())
        for section in _COMPARED:
            for key, value in before.get(section, {}).items():
                if key in now[section] and now[section][key] != value and f"{section}.{key}" not in NO_RESULT:
                    changed = f"began with {section}.{key}={value!r}, the sweep now has {now[section][key]!r}"
                    fix = "give another --output, or remove that run"
                    raise ConfigError(f"{trial.name}: its run in {folder} {changed}; {fix}")


def has_ended(trial: Trial, folder: Path) -> bool:
    """Return True if the last step of a trial has its metrics."""
    steps = [row["step"] for row in read_lines(folder / trial.name / METRICS_FILE)]
    return max(steps, default=-1) >= trial.settings.run.steps


def train(
    trial: Trial, folder: Path, show: Show, command: Command = _EMPO2_TRAIN, look: Look = lambda *_: None
) -> None:
    """Train, or go on from the last checkpoint, with a log beside the run's folder.

    Args:
        command: returns the command line for a descriptor with the settings.
        look: is called each second with the id of the training's process and None, and with each step that is done.

    Raises:
        ProcessError: the training failed; the message says why.
        KeyboardInterrupt: the user interrupted it; nothing is left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    new = NewLines(folder / trial.name / METRICS_FILE)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # as `empo2 train` has it from a shell, keys included
    with settings_descriptor(trial.settings) as descriptor, running(folder, environment) as processes:
        processes.start(trial.name, command(descriptor), inherit=(descriptor,), trains=True)
        process = processes.pid(trial.name)
        while True:
            done = processes.done(trial.name)
            look(process, None)
            for metrics in new.rows():
                show(f"step {metrics['step']}/{trial.settings.run.steps}  {step_summary(metrics)}")
                look(process, metrics["step"])
            if done:
                break
            processes.check()
            time.sleep(_POLL_SECONDS)
    if not has_ended(trial, folder):
        raise ProcessError(f"{trial.name} ended before its last step; see {folder / trial.name}.log")
