"""Create a run's folder, or continue one from its last checkpoint."""

import fcntl
import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import yaml

from empo2.memory import MemoryFileError, copy_memory, embedder_name
from empo2.memory.browse import embedder_of
from empo2.memory.file import reading
from empo2.recipe.config import Settings, with_task_files
from empo2.recipe.errors import ConfigError
from empo2.recipe.redaction import redacted
from empo2.recipe.rollout_log import rollout_files, step_of_file
from empo2.recipe.run_folder import (
    BESIDE_MEMORY,
    CHECKPOINTS,
    CONFIG_FILE,
    EPISODES_FILE,
    FACTS_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    NODES,
    ROLLOUTS,
    complete_checkpoints,
    damage_of,
    last_checkpoint,
    read_lines,
    replace_file,
    step_of,
)

_ASIDE = "set-aside-"
_BY_STEP = (METRICS_FILE, EPISODES_FILE)  # a line for each
# If these changed, the weights, tips and metrics so far would no longer be comparable with later ones.
_FIXED = ("algorithm.name", "model.path", "model.lora_rank", "model.lora_alpha", "memory.scope", "memory.embedder")


def open_run_directory(settings: Settings, profile: str | None) -> tuple[Path, Path | None]:
    """Create or continue the run's folder, write the resolved settings into it, and lock it for this process.

    Nothing is overwritten when a run is continued: data of steps after the last checkpoint, logs and settings are moved
    to a subfolder. So are those of a start that failed before a step was done, whose name may be given again.

    Returns:
        The folder, and the checkpoint to continue from; None for a new run.

    Raises:
        ConfigError: the folder exists and cannot be continued or written, or ``memory.from`` cannot be copied.
    """
    try:
        return _open(settings, profile)
    except OSError as error:
        raise _unwritable(settings, error.filename or "the run", error.strerror) from None


def check_run_directory(settings: Settings) -> str:
    """Return what `open_run_directory` would do; nothing is changed. A ConfigError where it would raise one."""
    run = settings.run
    if run.resume == "auto" and run.name is None:
        raise ConfigError("run.resume='auto': give run.name, the run to continue (or to begin)")
    _begins_with(settings)
    directory = Path(run.directory, run.name or "").absolute()
    existing = existing_folder(directory)
    if not existing.is_dir():
        raise _unwritable(settings, str(existing), "Not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _unwritable(settings, str(existing), "Permission denied")
    if run.name is None or _is_new(directory):
        return f"{directory} is new" if run.name else f"a new folder in {directory}"
    if run.resume == "auto":
        said = f"{directory} is continued after step {_step_to_continue(settings, directory)[1]}"
    elif _is_failed_start(directory):
        said = f"{directory} has a start that failed, and is used again"
    else:
        fix = "give another run.name, continue it with run.resume=auto, or remove it"
        raise ConfigError(f"run.name={run.name!r}: {directory} exists; {fix}")
    os.close(_lock(directory))
    return said


def existing_folder(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that there is."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _unwritable(settings: Settings, what: str, why: str | None) -> ConfigError:
    said = f"{what} cannot be written: {why}; give a folder that can"
    return ConfigError(f"run.directory={settings.run.directory!r}: {said}")


def _begins_with(settings: Settings) -> Path | None:
    """Return the memory that the run begins with; None for an empty one."""
    begins = settings.memory.from_
    return None if begins is None else memory_file(Path(begins), settings, key=f"memory.from={begins!r}")


def last_set_aside(directory: Path) -> Path | None:
    """Return the subfolder with what the start before this one left; None if there was none."""
    there = (folder for folder in directory.glob(f"{_ASIDE}*") if folder.name.removeprefix(_ASIDE).isdecimal())
    return max(there, key=_number, default=None)


def _number(aside: Path) -> int:
    return int(aside.name.removeprefix(_ASIDE))


def how_to_resume(directory: Path) -> str:
    """Return what continues the run of a folder, and after which step."""
    checkpoint = last_checkpoint(directory / CHECKPOINTS)
    begins = f"continues after step {step_of(checkpoint)}" if checkpoint else "starts over: no checkpoint is complete"
    return f"the same command with run.name={directory.name} run.resume=auto {begins}"


def _open(settings: Settings, profile: str | None) -> tuple[Path, Path | None]:
    run = settings.run
    check_run_directory(settings)
    name = run.name or f"{profile or 'run'}-{datetime.now():%Y%m%d-%H%M%S}"
    directory = Path(run.directory, name).absolute()
    source, checkpoint, step, is_new = _begins_with(settings), None, 0, _is_new(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _lock(directory)
    if not is_new and run.resume == "auto":
        checkpoint, step = _step_to_continue(settings, directory)
        if checkpoint and (damage := damage_of(checkpoint)):  # which reads all of it, and is not for `empo2 check`
            raise ConfigError(f"run.resume='auto': {damage}; {_without(checkpoint)}")
    if not is_new:  # continued, or begun again after a start that failed
        _set_aside(directory, step, run.validate_first and checkpoint is None)
    directory.chmod(0o700)
    if checkpoint is None and source is not None:
        copy_memory(source, directory / MEMORY_FILE)
        if (beside := source.with_suffix(".npz")).exists():  # what `algorithm.novelty: rnd` has learned
            shutil.copy2(beside, (directory / MEMORY_FILE).with_suffix(".npz"))
    write_settings(settings, directory)
    return directory, checkpoint


def _is_new(directory: Path) -> bool:
    return not directory.exists() or all(file.name == NODES for file in directory.iterdir())


def _is_failed_start(directory: Path) -> bool:
    """Return True for the folder of a run that has done no step, not even the validation before the first one."""
    if not (directory / CONFIG_FILE).is_file() or (directory / FACTS_FILE).exists():  # of an evaluation
        return False
    return not read_lines(directory / METRICS_FILE) and last_checkpoint(directory / CHECKPOINTS) is None


def _step_to_continue(settings: Settings, directory: Path) -> tuple[Path | None, int]:
    """Return the checkpoint that a run goes on from, None for the beginning, and its step."""
    name, config = settings.run.name, directory / CONFIG_FILE
    if not config.is_file():
        raise ConfigError(f"run.name={name!r}: {directory} is not the folder of a run; give another run.name")
    before, now = yaml.safe_load(config.read_text()), settings.to_dict()
    for key in _FIXED:
        section, setting = key.split(".")
        given = now[section][setting]
        if (began := before[section].get(setting, given)) != given:
            said = f"the run {name!r} began with {began!r}, which cannot change"
            raise ConfigError(f"{key}={given!r}: {said}; give that, or another run.name")
    checkpoint = last_checkpoint(directory / CHECKPOINTS)
    if checkpoint:
        _check_gpus(settings, checkpoint)
    step = step_of(checkpoint) if checkpoint else 0
    if step >= settings.run.steps:
        raise ConfigError(f"run.steps={settings.run.steps}: the run {name!r} has done {step} already; give more")
    return checkpoint, step


def _check_gpus(settings: Settings, checkpoint: Path) -> None:
    """Refuse another number of GPUs: verl has a file of each, and does not deal them anew."""
    hardware = settings.hardware
    of_first = next((checkpoint / "actor").glob("model_world_size_*_rank_0.pt"), None)
    if of_first and (saved := int(of_first.name.split("_")[3])) != hardware.gpus:
        given = f"hardware.nodes={hardware.nodes}, hardware.gpus_per_node={hardware.gpus_per_node}"
        said = f"{given}: {hardware.gpus} GPUs; {checkpoint} is of {saved}"
        fix = "give as many, or make a model of it by `empo2 export`, and begin a run with model.path and memory.from"
        raise ConfigError(f"{said}; {fix}")


def _without(checkpoint: Path) -> str:
    """Return what to do about a damaged checkpoint: the newest one before it that is whole."""
    before = [each for each in complete_checkpoints(checkpoint.parent) if step_of(each) < step_of(checkpoint)]
    whole = next((each for each in reversed(before) if not damage_of(each)), None)
    damaged = [checkpoint, *(each for each in before if whole is None or step_of(each) > step_of(whole))]
    begins = f"continues after step {step_of(whole)}" if whole else "starts over"
    return f"remove {' and '.join(map(str, damaged))}, and the same command {begins}"


def _lock(directory: Path) -> int:
    """Lock the folder while this process lives, or until the descriptor that is returned is closed."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        said = f"another process is training in {directory}; wait for it, or stop it"
        raise ConfigError(f"run.name={directory.name!r}: {said}") from None
    return descriptor


def _set_aside(directory: Path, step: int, validates: bool) -> None:
    """Keep what is of steps up to ``step``; move everything else to a subfolder, and its validation if played again."""
    last = last_set_aside(directory)
    aside = directory / f"{_ASIDE}{_number(last) + 1 if last else 1}"
    aside.mkdir()
    for file in [path for path in directory.iterdir() if path.is_file()]:
        if file.name in (*_BY_STEP, CONFIG_FILE):
            shutil.copy2(file, aside)
        else:
            file.rename(aside / file.name)
    (aside / ROLLOUTS).mkdir()
    for file in rollout_files(directory / ROLLOUTS):
        if step_of_file(file) > step or (validates and file.name.startswith(f"{step:06}-validation")):
            file.rename(aside / ROLLOUTS / file.name)
    for file in filter(Path.exists, (directory / name for name in _BY_STEP)):
        kept = [row for row in read_lines(file) if row["step"] <= step]
        replace_file(file, "".join(json.dumps(row) + "\n" for row in kept))


def memory_file(path: Path, settings: Settings, *, key: str) -> Path:
    """Return the memory of a run's folder or a checkpoint, or the file itself.

    Raises:
        ConfigError: ``key`` names no memory, or one of another embedder than ``memory.embedder``.
    """
    file = path / MEMORY_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{key}: no memory at {file}; give a run's folder, a checkpoint or a memory file")
    try:
        with reading(file) as database:
            name, _ = embedder_of(database)
    except MemoryFileError as error:
        raise ConfigError(f"{key}: {error}") from None
    if name != embedder_name(settings.memory.embedder):
        said = f"{file} was written with embedder {name!r}, not memory.embedder={settings.memory.embedder!r}"
        raise ConfigError(f"{key}: {said}; give that, or move it with `empo2 memory export` and `empo2 memory import`")
    return file


def put_memory(file: Path | None, folder: Path) -> None:
    """Copy a memory to where the gateway keeps its own; without one, only remove what an earlier command left.

    Raises:
        ConfigError: the memory is the one that would be removed.
    """
    if file is not None and file.resolve() == (folder / MEMORY_FILE).resolve():
        raise ConfigError(f"--memory-from {file}: is in the folder of the results; copy it elsewhere and give the copy")
    for name in (MEMORY_FILE, *BESIDE_MEMORY):
        (folder / name).unlink(missing_ok=True)
    if file is not None:
        copy_memory(file, folder / MEMORY_FILE)


def write_settings(settings: Settings, directory: Path) -> None:
    """Write the settings without secrets to the folder's config.yaml."""
    values = redacted(with_task_files(settings.to_dict(), Path.cwd()))  # the run folder may be shared with others
    replace_file(directory / CONFIG_FILE, yaml.safe_dump(values, sort_keys=False))
