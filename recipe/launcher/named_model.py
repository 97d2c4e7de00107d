"""Find the model, and the memory, that a command line names: a run's, one of the Hugging Face hub, or a server's."""

from dataclasses import dataclass
from pathlib import Path

from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher.checkpoints import find_checkpoint, merged, run_of
from empo2.recipe.launcher.model_files import resolve_model
from empo2.recipe.run_folder import CHECKPOINTS, CONFIG_FILE, MEMORY_FILE, SETTINGS_FILE, is_complete, step_of


@dataclass(frozen=True)
class NamedModel:
    """A model that is evaluated, served or exported.

    Attributes:
        name: for people and folder names.
        model: what vLLM loads, or the server's name of it; None for a checkpoint, until it is merged.
        checkpoint: the checkpoint's folder, if it is one.
    """

    name: str
    model: str | None = None
    checkpoint: Path | None = None

    @property
    def settings_file(self) -> Path | None:
        """The settings of the checkpoint's run, or those that were exported with a model."""
        return run_of(self.checkpoint) / CONFIG_FILE if self.checkpoint else self._exported(SETTINGS_FILE)

    @property
    def memory(self) -> Path | None:
        """The memory of the checkpoint's step, or the one that was exported with a model."""
        if self.checkpoint is None:
            return self._exported(MEMORY_FILE)
        file = self.checkpoint / MEMORY_FILE
        return file if file.is_file() else None

    def _exported(self, name: str) -> Path | None:
        file = Path(self.model or "", name)
        return file if self.model and file.is_file() else None

    def resolve(self) -> str:
        """Return what vLLM loads; a checkpoint is merged at first."""
        return self.model if self.model is not None else str(merged(self.checkpoint)) if self.checkpoint else self.name


def find_model(name: str, server: str | None) -> NamedModel:
    """Return what MODEL means on the command line.

    Args:
        name: a run's folder (its last checkpoint), a checkpoint, a Hugging Face folder or name, or the server's name.
        server: address of a server that has the model.

    Raises:
        ConfigError: there is no such thing.
    """
    if server is not None:
        return NamedModel(name.rsplit("/", 1)[-1], model=name)
    path = Path(name).expanduser()
    if is_complete(path) or (path / CONFIG_FILE).is_file() or (path / CHECKPOINTS).is_dir():
        checkpoint = find_checkpoint(path)
        return NamedModel(f"{run_of(checkpoint).name}-step-{step_of(checkpoint)}", checkpoint=checkpoint)
    try:
        model = resolve_model(name)
    except OSError as error:
        raise ConfigError(f"MODEL {name}: {error}") from None
    if isinstance(model, str):
        _check_hub_name(model)
    return NamedModel(name.rstrip("/").rsplit("/", 1)[-1], model=str(model))


def find_memory(path: Path) -> Path:
    """Return the memory file of a run's folder or a checkpoint, or the file itself.

    Raises:
        ConfigError: there is none.
    """
    file = path / MEMORY_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--memory-from {path}: no memory; give a run's folder, a checkpoint or a memory file")
    return file


def _check_hub_name(name: str) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hf_hub_download(name, "config.json")
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"MODEL {name}: no run, checkpoint or model in a folder of that name, and the Hugging Face hub does not "
            f"give it: {reason}"
        ) from None
