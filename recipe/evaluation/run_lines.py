"""Training runs as the lines of a report: runs that differ only in their seed are one line, with an interval."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from empo2.recipe.config import flat
from empo2.recipe.evaluation.statistics import Interval, over_seeds
from empo2.recipe.run_folder import CONFIG_FILE, Row, read_metrics

# How long a run is, how often it is validated and where it stands is not what is compared.
_NOT_COMPARED = ("run", "gateway", "algorithm.seed")


@dataclass(frozen=True)
class Run:
    """A run's folder, the rows of its metrics, and its settings by dotted key, empty if the folder has none."""

    folder: Path
    rows: Sequence[Row]
    settings: Mapping[str, Any]


class End(NamedTuple):
    """Where a metric of a line ends: its mean at the last step at which all runs that have it have it."""

    value: Interval
    step: int
    seeds: int  # that have the metric


@dataclass(frozen=True)
class Line:
    """A line of the report: runs with the same settings, one for each seed."""

    label: str
    runs: Sequence[Run]

    @property
    def last_step(self) -> int:
        """Return the last step that all its runs have done."""
        return min(int(run.rows[-1]["step"]) for run in self.runs)

    def measured(self, key: str) -> list[dict[float, float]]:
        """Return a metric by step, for each run that has it."""
        found = [{row["step"]: row[key] for row in run.rows if key in row} for run in self.runs]
        return [values for values in found if values]

    def curve(self, key: str) -> tuple[list[float], list[Interval]]:
        """Return a metric's mean over seeds, with its interval, at each step at which all of them have it."""
        found = self.measured(key)
        steps = sorted(set[float]().union(*found).intersection(*found))
        return steps, [over_seeds([values[step] for values in found]) for step in steps]

    def end(self, key: str) -> End | None:
        """Return the last point of a metric's curve; None if it has none."""
        steps, found = self.curve(key)
        return End(found[-1], int(steps[-1]), len(self.measured(key))) if steps else None


def read_run(folder: Path) -> Run:
    """Return a run of a folder; raise as `read_metrics`."""
    file = folder / CONFIG_FILE
    settings = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return Run(folder, read_metrics(folder), dict(flat(settings)))


def lines_of(folders: Sequence[Path]) -> list[Line]:
    """Return the runs as lines, in the order of the first of each, named after its folders; raise as `read_metrics`."""
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        run = read_run(folder)
        compared = {key: value for key, value in run.settings.items() if not _is_left_out(key)}
        groups.setdefault(repr(compared) if compared else str(folder), []).append(run)
    labels = [_label(runs) for runs in groups.values()]
    return [
        Line(label if labels.count(label) == 1 else str(runs[0].folder), runs)
        for label, runs in zip(labels, groups.values(), strict=True)
    ]


def differences(lines: Sequence[Line]) -> dict[str, list[str]]:
    """Return the settings in which lines differ: the value of each line, by dotted key; "" where it has none."""
    keys = {key: None for line in lines for key in line.runs[0].settings if not _is_left_out(key)}
    values = {key: [str(line.runs[0].settings.get(key, "")) for line in lines] for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def _label(runs: Sequence[Run]) -> str:
    """Return the common beginning of the folders' names, such as ``empo2`` for empo2-10 and empo2-11."""
    names = [run.folder.resolve().name for run in runs]
    common = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 (names, not paths)
    if any(name[len(common) :][:1].isdigit() for name in names):
        common = common.rstrip("0123456789")
    return common.rstrip("-_.") or names[0]


def _is_left_out(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _NOT_COMPARED)
