"""Show a run's ``metrics.jsonl`` as a table of its steps and as a picture of its curves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from empo2.recipe.errors import Empo2Error
from empo2.recipe.run_folder import METRICS_FILE, step_mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

type Row = dict[str, float]
"""One step's metrics by name, ``step`` among them; metrics that were not measured, or not finite, are absent."""


class Series(NamedTuple):
    """One line of a panel: values are multiplied by ``scale`` (100: fraction to percent)."""

    key: str
    color: str
    label: str | None = None
    scale: float = 1


# Colors that color-blind readers can tell apart (Okabe and Ito, 2008).
_BLUE, _GREEN, _RED, _GREY, _BLACK = "#0072B2", "#009E73", "#D55E00", "#8C8C8C", "#222222"

_MODES = {  # the results of step_mode: marker, color
    "no memory": ("o", _BLUE),
    "memory, on-policy": ("^", _GREEN),
    "memory, off-policy": ("D", _RED),
    "mixed": ("s", _GREY),
}
_RETURN, _VALIDATION = "training/return", "val/return"
_PANELS: tuple[tuple[str, str, *tuple[Series, ...]], ...] = (  # title, unit, lines
    ("Return", "mean per episode", Series(_RETURN, _GREY, "training"), Series(_VALIDATION, _BLACK, "validation")),
    (
        "Success",
        "% of episodes",
        Series("training/success_rate", _GREY, "training", 100),
        Series("val/success_rate", _BLACK, "validation", 100),
    ),
    ("Intrinsic return", "mean per episode", Series("training/intrinsic_return", _BLUE)),
    ("Memory", "tips stored", Series("empo2/memory_size", _GREEN)),
    ("Injection", "tips per call", Series("empo2/tips_injected_per_call", _GREEN)),
    ("Masked", "% of off-policy tokens", Series("empo2/masked_token_fraction", _RED, scale=100)),
    ("Entropy", "nats per token", Series("actor/entropy", _BLUE)),
    ("Time", "s per step", Series("timing_s/step", _BLACK, "whole step"), Series("timing_s/gen", _GREY, "rollouts")),
)


def read_metrics(run: Path) -> list[Row]:
    """Return the rows of ``run/metrics.jsonl`` by ascending step.

    Lines of the same step are merged; the newest value wins. An incomplete line, left by a run that is being written
    or was killed, is skipped.

    Raises:
        Empo2Error: there is no such file, or no complete line in it.
    """
    file = run / METRICS_FILE
    if not file.is_file():
        raise Empo2Error(f"{run}: no metrics.jsonl; give the folder of a run, such as runs/demo")
    steps: dict[int, Row] = {}
    for line in file.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        steps.setdefault(row["step"], {}).update({key: value for key, value in row.items() if value is not None})
    if not steps:
        raise Empo2Error(f"{file}: no step yet; look again when the first step, or the validation before it, is done")
    return [steps[step] for step in sorted(steps)]


def print_table(run: Path, console: "Console | None" = None) -> None:
    """Print a table of ``run`` with one line per step.

    Raises:
        Empo2Error: as `read_metrics`.
    """
    from rich.console import Console

    (console or Console()).print(steps_table(read_metrics(run), title=str(run)))


def steps_table(rows: Sequence[Row], title: str) -> "Table":
    """Return a table with one line for each of `read_metrics`'s rows; metrics that were not measured stay empty."""
    from rich import box
    from rich.table import Table

    columns = {
        "return": (_RETURN, "{:.2f}"),
        "intrinsic": ("training/intrinsic_return", "{:.2f}"),
        "val return": (_VALIDATION, "{:.2f}"),
        "memory": ("empo2/memory_size", "{:.0f}"),
        "tips /call": ("empo2/tips_injected_per_call", "{:.1f}"),
        "dropped": ("empo2/rollouts_dropped", "{:.0f}"),
        "time": ("timing_s/step", "{:.0f} s"),
    }
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("step", justify="right")
    table.add_column("mode", no_wrap=True)
    for heading in columns:
        table.add_column(heading.replace(" ", "\n"), justify="right")
    for row in rows:
        cells = (form.format(row[key]) if key in row else "" for key, form in columns.values())
        table.add_row(f"{row['step']:.0f}", _mode_text(row), *cells)
    return table


def _mode_text(row: Row) -> str:
    mode = step_mode(row) or ""
    if mode != "mixed":
        return mode
    return f"{row['empo2/memory_fraction']:.0%} mem, {row.get('empo2/off_policy_fraction', 0):.0%} off"


def draw_curves(*runs: Path) -> Path:
    """Draw the curves of one run, or the returns of several in one plot.

    Returns:
        The PNG file: ``curves.png`` in the run's folder; for several runs, ``comparison.png`` beside the first run.

    Raises:
        Empo2Error: as `read_metrics`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 8}):
        if len(runs) == 1:
            figure, target = _draw_run(read_metrics(runs[0])), runs[0] / "curves.png"
        else:
            named = [(run.resolve().name, read_metrics(run)) for run in runs]
            figure, target = _draw_comparison(named), runs[0].resolve().parent / "comparison.png"
        figure.savefig(target, dpi=150)
        plt.close(figure)
    return target


def _draw_run(rows: Sequence[Row]):
    import matplotlib.pyplot as plt

    measured = {key for row in rows for key in row}
    panels = [panel for panel in _PANELS if any(series.key in measured for series in panel[2:])] or _PANELS[:1]
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(4 * columns, 3.2 * lines), squeeze=False, layout="constrained")
    for axes, (title, unit, *lines_of_panel) in zip(grid.flat, panels, strict=False):
        for series in lines_of_panel:
            _draw(axes, rows, series)
        if title == "Return":
            _mark_modes(axes, rows)
        _label(axes, title, unit)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    return figure


def _draw_comparison(named: Sequence[tuple[str, Sequence[Row]]]):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for index, (name, rows) in enumerate(named):
        _draw(axes, rows, Series(_RETURN, f"C{index}", f"{name}, training"), alpha=0.4)
        _draw(axes, rows, Series(_VALIDATION, f"C{index}", f"{name}, validation"))
    _label(axes, "Return", "mean per episode")
    return figure


def _points(rows: Sequence[Row], series: Series) -> tuple[list[float], list[float]]:
    measured = [row for row in rows if series.key in row]
    return [row["step"] for row in measured], [row[series.key] * series.scale for row in measured]


def _draw(axes: "Axes", rows: Sequence[Row], series: Series, alpha: float = 1) -> None:
    steps, values = _points(rows, series)
    if steps:
        axes.plot(steps, values, color=series.color, marker=".", label=series.label, alpha=alpha)


def _mark_modes(axes: "Axes", rows: Sequence[Row]) -> None:
    for mode, (marker, color) in _MODES.items():
        steps, values = _points([row for row in rows if step_mode(row) == mode], Series(_RETURN, color))
        if steps:
            axes.scatter(steps, values, marker=marker, color=color, s=28, zorder=3, label=mode)


def _label(axes: "Axes", title: str, unit: str) -> None:
    axes.set_title(title, loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.locator_params(axis="x", integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
