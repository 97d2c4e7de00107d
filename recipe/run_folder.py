"""The files of a run's folder, its metrics, and checkpoints (weights and memory of one step)."""

import contextlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from empo2.memory.file import MemoryFileError, check_memory
from empo2.recipe.errors import Empo2Error

type Row = dict[str, float]
"""One step's metrics by name, ``step`` among them; metrics that were not measured, or not finite, are absent."""

MEMORY_FILE = "memory.sqlite"
REPLAY_FILE = "replay.pt"  # stored successes, see trainer/replay.py
METRICS_FILE = "metrics.jsonl"
EPISODES_FILE = "episodes.jsonl"  # one trained episode of each step
ROLLOUTS = "rollouts"  # a folder, see rollout_log.py
CONFIG_FILE = "config.yaml"
SETTINGS_FILE = "empo2.yaml"  # the same in the folder of an exported model, whose config.json is the model's
TASKS_FILE = "tasks.json"
FACTS_FILE = "evaluation.json"  # what decides the results of an evaluation's folder
CHECKPOINTS = "checkpoints"
NODES = "nodes"  # logs of a cluster's nodes, which examples/cluster/train.sbatch begins before the run

_COMPLETE = "complete"  # a list of the files with their sizes, written last, so that an incomplete checkpoint lacks it
BESIDE_MEMORY = tuple(f"{MEMORY_FILE}{suffix}" for suffix in (".lock", "-wal", "-shm"))  # while it is in use
_STEP = "global_step_"  # verl's


def read_metrics(run: Path) -> list[Row]:
    """Return the rows of ``run/metrics.jsonl`` by ascending step.

    Lines of the same step are merged; the newest value wins. An incomplete line, left by a run that is being written
    or was killed, is skipped. An Empo2Error if there is no such file, or no complete line in it.
    """
    file = run / METRICS_FILE
    if not file.is_file():
        raise Empo2Error(f"{run}: no metrics.jsonl; give the folder of a run, such as runs/demo")
    steps: dict[int, Row] = {}
    for row in read_lines(file):
        steps.setdefault(row["step"], {}).update({key: value for key, value in row.items() if value is not None})
    if not steps:
        raise Empo2Error(f"{file}: no step yet; look again when the first step, or the validation before it, is done")
    return [steps[step] for step in sorted(steps)]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return what the lines of a JSON Lines file hold; incomplete lines are skipped, and an absent file is empty."""
    found = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def replace_file(file: Path, text: str) -> None:
    """Replace a file atomically; where that fails, as on a full disk, the folder is as before."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        temporary.write_text(text)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def step_mode(metrics: Mapping[str, Any]) -> str | None:
    """Return the mode of a step's rollouts by its metrics, ``mixed`` where they differ; None for a mere validation."""
    if "empo2/memory_fraction" not in metrics:
        return None
    match metrics["empo2/memory_fraction"], metrics.get("empo2/off_policy_fraction", 0):
        case 0, _:
            return "no memory"
        case 1, 0:
            return "memory, on-policy"
        case 1, 1:
            return "memory, off-policy"
    return "mixed"


# By metric, with what mends it.
_LOSSES = {
    "repeated_calls": "calls not trained (their request was sent again)",
    "turns_dropped": "turns dropped (their tip-free prompt, tokens or log-probs are unknown: see gateway.log)",
    "image_calls": "calls not trained (they have images)",
    "overlong_rows": "rows dropped (raise model.max_prompt_tokens)",
    "cut_rows": "rows cut (raise model.max_episode_tokens)",
    "reply_tokens_lost": "reply tokens without gradient (of what was dropped or cut)",
    "untaught_tokens": "reply tokens not distilled (vLLM gave no other tokens with them)",
    "memory_failures": "memory failures (see gateway.log)",
    "memory_late": "calls sent without tips (raise memory.embedder_threads or memory.deadline)",
    "disagreeing_rows": "rows without their clipped term (algorithm.log_prob_gap_limit: vLLM and trainer disagree)",
    "reflections_failed": "tips not written (see gateway.log; reflection.timeout)",
    "spans_lost": "spans lost (see gateway.log; gateway.traces)",
}


def losses(metrics: Mapping[str, Any]) -> list[str]:
    """Return what a step lost of the rollouts that it trained on, or was short of."""
    found = ((metrics.get(f"empo2/{name}"), told) for name, told in _LOSSES.items())
    return [f"{count:.0f} {told}" for count, told in found if count]


def checkpoint_folder(directory: Path, step: int) -> Path:
    """Return the folder in which verl puts the checkpoint of a step."""
    return directory / f"{_STEP}{step}"


def is_checkpoint_name(name: str) -> bool:
    return name.removeprefix(_STEP).isdecimal() and name.startswith(_STEP)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_STEP))


def mark_complete(folder: Path) -> None:
    """Write all files of a checkpoint to the disk, and then the mark that it is complete."""
    temporary = folder / f".{_COMPLETE}"  # one that a killed process left is none of the files
    files = {
        str(file.relative_to(folder)): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in (_COMPLETE, temporary.name, *BESIDE_MEMORY)
    }
    for path in (*files.values(), folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync(path)
    temporary.write_text(json.dumps({name: file.stat().st_size for name, file in files.items()}, indent=1))
    _sync(temporary)
    temporary.replace(folder / _COMPLETE)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage_of(folder: Path) -> str:
    """Return what is damaged in a complete checkpoint, one file with the reason; "" if all of it can be read.

    Files must have the sizes that they were written with, the members of torch's archives their checksums.
    """
    mark = folder / _COMPLETE
    try:
        marked: dict[str, int] = json.loads(mark.read_text() or "{}")  # an older version wrote an empty one
    except (OSError, ValueError) as error:
        return f"{mark} cannot be read: {error}"
    for name, size in marked.items():
        file = folder / name
        try:
            if (found := file.stat().st_size) != size:
                return f"{file} has {found:,} bytes of {size:,}"
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    if (member := archive.testzip()) is not None:
                        return f"{file} is damaged at {member}"
            if name == MEMORY_FILE:
                check_memory(file)
        except MemoryFileError as error:
            return str(error)
        except (OSError, zipfile.BadZipFile) as error:
            return f"{file} cannot be read: {error}"
    return ""


def is_complete(folder: Path) -> bool:
    """Return True for the folder of a complete checkpoint."""
    return (folder / _COMPLETE).is_file()


def saved_at(folder: Path) -> int:
    """Return when a complete checkpoint was saved, in nanoseconds of Unix time."""
    return (folder / _COMPLETE).stat().st_mtime_ns


def last_checkpoint(directory: Path) -> Path | None:
    """Return the complete checkpoint of the latest step; None if there is none."""
    return next(reversed(complete_checkpoints(directory)), None)


def remove_old_checkpoints(directory: Path, keep: int) -> None:
    """Remove all but the latest ``keep`` complete ones; verl forgets older ones when a run is continued."""
    for folder in set(_checkpoints(directory)) - set(complete_checkpoints(directory)[-keep:]):
        shutil.rmtree(folder)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints, earliest step first."""
    return sorted(filter(is_complete, _checkpoints(directory)), key=step_of)


def _checkpoints(directory: Path) -> Iterator[Path]:
    """Yield all checkpoints; a copy of another name is none."""
    return (folder for folder in directory.glob(f"{_STEP}*") if is_checkpoint_name(folder.name))
