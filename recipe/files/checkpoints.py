"""Find the model that a command line names: a run's, one of the Hugging Face hub, or a server's.

A checkpoint's weights, and a LoRA into them, are merged into a Hugging Face folder.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from empo2.memory.cpu import fast_dtype
from empo2.recipe.errors import ConfigError, ProcessError
from empo2.recipe.files.models import built, merge_adapter, resolve_model
from empo2.recipe.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    MEMORY_FILE,
    SETTINGS_FILE,
    complete_checkpoints,
    is_checkpoint_name,
    is_complete,
    step_of,
)

_ADAPTER = "lora_adapter"  # verl's merger puts a LoRA there, beside the weights that it belongs to
_LINES = 5


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Return a checkpoint's folder, the given one or a run's of a step (the last); a ConfigError if there is none."""
    path = path.absolute()
    if is_complete(path):
        if not is_checkpoint_name(path.name):
            said = "a checkpoint's folder keeps its name, global_step_N, and its place in a run's folder"
            raise ConfigError(f"{path}: {said}; give that, or make a model of it there by `empo2 export`")
        if step not in (None, step_of(path)):
            raise ConfigError(f"--step {step}: {path} is the checkpoint of another step; give the run's folder")
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
    """Return the Hugging Face folder of a checkpoint's weights, made once in it; a ProcessError if verl cannot."""
    return built(checkpoint.absolute() / "merged", lambda target: _merge(checkpoint.absolute(), target))


def _merge(checkpoint: Path, target: Path) -> None:
    made = target.with_name("weights")
    trained_on = yaml.safe_load((run_of(checkpoint) / CONFIG_FILE).read_text())["hardware"]["device"]
    unrounded = trained_on == "cpu" and fast_dtype() == "float32"  # what vLLM got in training: compat/verl.py
    merger = "empo2.recipe.trainer.compat.merger" if unrounded else "verl.model_merger"
    command = [sys.executable, "-m", merger, "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(checkpoint / "actor"), "--target_dir", str(made)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}  # it needs main memory only
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode or not (made / "config.json").is_file():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise ProcessError(f"{checkpoint}: verl cannot merge its weights: {' | '.join(lines[-_LINES:])}")
    if (made / _ADAPTER).is_dir():
        merge_adapter(made, made / _ADAPTER, target, "not" if unrounded else "at random")
    else:
        made.rename(target)


@dataclass(frozen=True)
class NamedModel:
    """A model that is evaluated, served or exported."""

    name: str  # for people and folder names
    model: str | None = None  # what vLLM loads, or the server's name of it; None for a checkpoint
    checkpoint: Path | None = None  # its folder

    @property
    def settings_file(self) -> Path | None:
        """The settings of the checkpoint's run, or those that were exported with a model."""
        return run_of(self.checkpoint) / CONFIG_FILE if self.checkpoint else self._beside(SETTINGS_FILE)

    @property
    def memory(self) -> Path | None:
        """The memory of the checkpoint's step, or the one that was exported with a model."""
        return self._beside(MEMORY_FILE)

    def _beside(self, name: str) -> Path | None:
        file = Path(self.checkpoint or self.model or "", name)
        return file if file.is_file() else None

    def resolve(self) -> str:
        """Return what vLLM loads; a checkpoint is merged at first."""
        return str(merged(self.checkpoint)) if self.checkpoint else self.model or self.name


def find_model(name: str, server: str | None) -> NamedModel:
    """Return what MODEL means on the command line; a ConfigError if there is no such thing.

    Args:
        name: a run's folder (its last checkpoint), a checkpoint, a Hugging Face folder or name, or the server's name.
        server: address of a server that has the model.
    """
    if server is not None:
        return NamedModel(name.rsplit("/", 1)[-1], model=name)
    path = Path(name).expanduser()
    if is_complete(path) or (path / CONFIG_FILE).is_file() or (path / CHECKPOINTS).is_dir():
        checkpoint = find_checkpoint(path)
        return NamedModel(f"{run_of(checkpoint).name}-step-{step_of(checkpoint)}", checkpoint=checkpoint)
    try:
        model = resolve_model(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"MODEL {name}: {error}") from None
    if isinstance(model, str):
        _check_hub_name(model)
    return NamedModel(name.rstrip("/").rsplit("/", 1)[-1], model=str(model))


def _check_hub_name(name: str) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hf_hub_download(name, "config.json")
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        said = "no run, checkpoint or model in a folder of that name, nor one of the Hugging Face hub"
        raise ConfigError(f"MODEL {name}: {said}: {reason}") from None
