"""The files of a run's folder, the mode of a step by its metrics, and checkpoints (weights and memory of one step)."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEMORY_FILE = "memory.sqlite"
METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
TASKS_FILE = "tasks.json"
CHECKPOINTS = "checkpoints"

_COMPLETE = "complete"  # an empty file, written last, so that an incomplete checkpoint lacks it
_STEP = "global_step_"  # verl's


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


def checkpoint_folder(directory: Path, step: int) -> Path:
    """Return the folder in which verl puts the checkpoint of a step."""
    return directory / f"{_STEP}{step}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_STEP))


def mark_complete(folder: Path) -> None:
    (folder / _COMPLETE).touch()


def is_complete(folder: Path) -> bool:
    """Return True for the folder of a complete checkpoint."""
    return (folder / _COMPLETE).is_file()


def last_checkpoint(directory: Path) -> Path | None:
    """Return the complete checkpoint of the latest step; None if there is none."""
    return next(reversed(_complete_checkpoints(directory)), None)


def remove_old_checkpoints(directory: Path, keep: int) -> None:
    """Remove all but the latest ``keep`` complete ones; verl forgets older ones when a run is continued."""
    for folder in set(directory.glob(f"{_STEP}*")) - set(_complete_checkpoints(directory)[-keep:]):
        shutil.rmtree(folder)


def _complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints, earliest step first."""
    return sorted((marker.parent for marker in directory.glob(f"{_STEP}*/{_COMPLETE}")), key=step_of)
