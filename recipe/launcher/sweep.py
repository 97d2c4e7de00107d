"""Train the trials of a sweep, one after another; each can be interrupted and goes on from its last checkpoint."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import yaml

from empo2.recipe.errors import ConfigError, ProcessError
from empo2.recipe.launcher.commands import empo2_command, environment_without, in_memory
from empo2.recipe.launcher.plan import Trial
from empo2.recipe.launcher.processes import running
from empo2.recipe.launcher.progress import NewLines, step_summary
from empo2.recipe.redaction import redacted
from empo2.recipe.run_folder import CONFIG_FILE, METRICS_FILE, read_lines

type Show = Callable[[str], None]  # shows a line of progress
type Command = Callable[[int], list[str]]

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
                if key in now[section] and now[section][key] != value:
                    changed = f"began with {section}.{key}={value!r}, the sweep now has {now[section][key]!r}"
                    fix = "give another --output, or remove that run"
                    raise ConfigError(f"{trial.name}: its run in {folder} {changed}; {fix}")


def has_ended(trial: Trial, folder: Path) -> bool:
    """Return True if the last step of a trial has its metrics."""
    steps = [row["step"] for row in read_lines(folder / trial.name / METRICS_FILE)]
    return max(steps, default=-1) >= trial.settings.run.steps


def train(trial: Trial, folder: Path, show: Show, command: Command = _EMPO2_TRAIN) -> None:
    """Train, or go on from the last checkpoint, with a log and a clock beside the run's folder.

    Args:
        command: returns the command line for a descriptor with the settings.

    Raises:
        ProcessError: the training failed; the message says why.
        KeyboardInterrupt: the user interrupted it; nothing is left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock = clock_of(trial, folder)
    before = max((line["cpu_seconds"] for line in read_lines(clock)), default=0.0)
    new = NewLines(folder / trial.name / METRICS_FILE)
    with in_memory(trial.settings) as file, running(folder, environment_without()) as processes:
        processes.start(trial.name, command(file), inherit=(file,), may_end=True, saves=True)
        counter = CpuSeconds(processes.pid(trial.name))
        while True:
            done, seconds = processes.done(trial.name), counter.look()
            with clock.open("a") as times:
                for metrics in new.rows():
                    show(f"step {metrics['step']}/{trial.settings.run.steps}  {step_summary(metrics)}")
                    line = {"step": metrics["step"], "cpu_seconds": round(before + seconds)}
                    times.write(json.dumps(line) + "\n")
            if done:
                break
            processes.check()
            time.sleep(_POLL_SECONDS)
    if not has_ended(trial, folder):
        raise ProcessError(f"{trial.name} ended before its last step; see {folder / trial.name}.log")


def clock_of(trial: Trial, folder: Path) -> Path:
    """Return the file with the CPU seconds from the beginning until each step was done, interruptions left out."""
    return folder / f"{trial.name}.cpu.jsonl"


class CpuSeconds:
    """Counts the CPU seconds of a process and of all that it started, ended processes included, up to the last look."""

    def __init__(self, process: int) -> None:
        self._root = psutil.Process(process)
        self._seconds: dict[tuple[int, float], float] = {}

    def look(self) -> float:
        """Return the seconds until now; what was used since the last look by a process that has ended is not in it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = times.user + times.system
        return sum(self._seconds.values())
