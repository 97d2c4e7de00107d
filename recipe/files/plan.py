"""Read a sweep's file: arms (configurations of settings), a grid of values, and seeds."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from empo2.recipe.config import Settings, lay_over, load_settings, nested, read_layer, with_task_files
from empo2.recipe.errors import ConfigError

ABLATIONS = Path(__file__).parents[1] / "sweeps" / "ablations.yaml"
SHAPE = "a sweep has seeds, settings, arms (each with title, seeds, ablation, settings) and grid (key: [values])"

_Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
_Count = Annotated[int, Field(gt=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Arm(_Part):
    """One configuration."""

    title: str | None = None  # in the report; None for its key
    seeds: _Count | None = None  # how many, from 1 on; None for the file's
    ablation: str | None = None  # arm of recipe/sweeps/ablations.yaml whose settings it has
    settings: dict[str, Any] = {}  # laid over those


class Sweep(_Part):
    """The content of a sweep's file."""

    seeds: _Count = 1  # of each arm that does not say otherwise
    settings: dict[str, Any] = {}  # of all arms
    arms: dict[_Name, Arm] = {}  # by name; empty for one with the file's name
    # Values by dotted key of a setting; every arm is trained with each combination of them.
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}


@dataclass(frozen=True)
class Trial:
    """One training: an arm with a seed; ``settings`` are complete."""

    arm: str
    title: str
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"


def read_plan(
    file: Path,
    folder: Path | None = None,
    *,
    profile: str | None = None,
    config: Path | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Path, list[Trial]]:
    """Return a sweep's folder and its trials, in the order in which they are run: the first seed of every arm first.

    An arm's settings are laid over the sweep's, these over ``config``, and this over the profile; overrides are last.

    Args:
        folder: of all runs; None for one named after the file, in ``run.directory``.

    Raises:
        ConfigError: the file or an arm's settings are not valid; the message names the arm.
    """
    sweep = _read(file)
    if folder is None:
        directory = load_settings(profile, overrides, file=config, layer=sweep.settings).run.directory
        folder = Path(directory, file.stem)
    trials: dict[str, Trial] = {}
    named: dict[str, str] = {}  # the arm of each title
    for name, title, seeds, layer in _configurations(sweep, file):
        if (other := named.setdefault(title, name)) != name:
            said = "runs of one title are seeds of one arm in the report; give another title"
            raise ConfigError(f"{file}: arms {other} and {name} have the title {title!r}; {said}")
        try:
            settings = load_settings(profile, overrides, file=config, layer=layer)
        except ConfigError as error:
            raise ConfigError(f"{file}: arm {name}: {error}") from None
        if "seed" in layer.get("algorithm", {}) or any(each.startswith("algorithm.seed=") for each in overrides):
            raise ConfigError(f"{file}: algorithm.seed: runs have their own, from 1 on; give how many as `seeds`")
        for seed in range(1, seeds + 1):
            trial = f"{name}-{seed}"
            if trial in trials:
                raise ConfigError(f"{file}: {trial} is the name of two runs; rename an arm, or change the grid")
            run = {"name": trial, "directory": str(folder), "resume": "auto"}
            # Another process reads it, from a folder of its own.
            complete = with_task_files(settings.to_dict(), Path.cwd())
            own = lay_over(complete, {"run": run, "algorithm": {"seed": seed}})
            trials[trial] = Trial(name, title, seed, Settings.model_validate(own))
    return folder, sorted(trials.values(), key=lambda trial: trial.seed)


def ablation(name: str) -> dict[str, Any]:
    """Return the settings of a named ablation; a ConfigError if there is none of this name."""
    arms = _read(ABLATIONS).arms
    if name not in arms:
        close = get_close_matches(name, arms, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"ablation {name!r}: there is none of this name, but {', '.join(arms)}{hint}")
    return arms[name].settings


def _read(file: Path) -> Sweep:
    try:
        return Sweep.model_validate(read_layer(file, "FILE"))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{file}: {key}={problem['input']!r}: {problem['msg'].lower()}; {SHAPE}") from None


def _configurations(sweep: Sweep, file: Path) -> Iterator[tuple[str, str, int, Mapping[str, Any]]]:
    """Yield name, title, number of seeds and settings of each arm in each cell of the grid; files are placed."""
    cells = [dict(zip(sweep.grid, values, strict=True)) for values in itertools.product(*sweep.grid.values())]
    for (name, arm), cell in itertools.product((sweep.arms or {"": Arm()}).items(), cells):
        layer = lay_over(sweep.settings, ablation(arm.ablation) if arm.ablation else {})
        layer = lay_over(layer, arm.settings)
        for key, value in cell.items():
            layer = lay_over(layer, nested(key, value))
        words = [key.rpartition(".")[2] for key in cell]
        short = {key: word if words.count(word) == 1 else key for key, word in zip(cell, words, strict=True)}
        values = {short[key]: value for key, value in cell.items()}
        parts = [name, *(re.sub(r"[^\w.]+", "-", f"{key}-{value}").strip("-") for key, value in values.items())]
        titles = [arm.title or name, *(f"{key}={value}" for key, value in values.items())]
        found = "-".join(filter(None, parts)) or re.sub(r"[^\w.]+", "-", file.stem)
        title = ", ".join(filter(None, titles)) or found
        yield found, title, arm.seeds or sweep.seeds, with_task_files(layer, file.parent)
