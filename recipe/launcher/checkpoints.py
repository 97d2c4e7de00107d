"""Find a run's checkpoint, and merge its weights, and a LoRA into them, into a Hugging Face folder."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from empo2.memory.cpu import fast_dtype
from empo2.recipe.errors import ConfigError, ProcessError
from empo2.recipe.launcher.model_files import merge_adapter
from empo2.recipe.run_folder import CHECKPOINTS, CONFIG_FILE, complete_checkpoints, is_complete, step_of

_MERGED = "merged"
_ADAPTER = "lora_adapter"  # verl's merger puts a LoRA there, beside the weights that it belongs to
_LINES = 5


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Return a checkpoint's folder: the given one, or one of a run's folder.

    Args:
        step: of the run's checkpoint; None for the last.

    Raises:
        ConfigError: there is no complete checkpoint.
    """
    if is_complete(path) and step in (None, step_of(path)):
        return path
    if not (path / CONFIG_FILE).is_file() and not (path / CHECKPOINTS).is_dir():
        raise ConfigError(f"{path}: not a complete checkpoint, nor a run's folder")
    found = {step_of(each): each for each in complete_checkpoints(path / CHECKPOINTS)}
    if not found:
        raise ConfigError(f"{path}: the run has no checkpoint; run.save_every makes them")
    if step not in (None, *found):
        raise ConfigError(f"{path}: no checkpoint of step {step}; there are those of {', '.join(map(str, found))}")
    return found[max(found) if step is None else step]


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return checkpoint.absolute().parents[1]


def merged(checkpoint: Path) -> Path:
    """Return the Hugging Face folder of a checkpoint's weights, made once, inside of the checkpoint.

    Raises:
        ProcessError: verl's merger failed; the message has the end of its output.
    """
    from empo2.recipe.trainer.ray_environment import device

    target = checkpoint.absolute() / _MERGED
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(prefix=".merging-", dir=target.parent) as scratch:
        made = Path(scratch) / _MERGED
        unrounded = device() == "cpu" and fast_dtype() == "float32"  # what vLLM got in training: compat/verl.py
        merger = "empo2.recipe.trainer.compat.merger" if unrounded else "verl.model_merger"
        command = [sys.executable, "-m", merger, "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(target.parent / "actor"), "--target_dir", str(made)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}  # it needs main memory only
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
        if done.returncode or not (made / "config.json").is_file():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise ProcessError(f"{checkpoint}: verl cannot merge its weights: {' | '.join(lines[-_LINES:])}")
        if (made / _ADAPTER).is_dir():
            whole = Path(scratch) / "whole"
            merge_adapter(made, made / _ADAPTER, whole)
            made = whole
        made.rename(target)  # atomic: the folder is complete or absent
    return target
