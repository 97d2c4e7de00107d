"""The curves of training runs, a drawing for each metric."""

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from empo2.recipe.evaluation.run_lines import End, Line
from empo2.recipe.evaluation.statistics import Interval
from empo2.recipe.protocol import TRAIN_PANEL, UNSEEN_PANEL
from empo2.recipe.run_folder import step_mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors that color-blind readers can tell apart (Okabe and Ito, 2008), on white and on black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B58900", "#3C9DD0", "#8C8C8C", "#7B5EA7")
_MODES = {"no memory": "o", "memory, on-policy": "^", "memory, off-policy": "D", "mixed": "s"}  # as of step_mode
_TEXT = "#123457"  # stands for the page's own color until the drawing is done
_FEW = 40  # points that still get a mark each


class Chart(NamedTuple):
    """A metric to draw, times ``scale`` (100: fraction to percent), and dashed the same one with tips."""

    title: str
    unit: str
    key: str
    with_tips: str | None = None
    scale: float = 1

    def end(self, line: Line) -> End | None:
        """Return where a line ends, as `Line.end`, in the unit of the chart."""
        end = line.end(self.key)
        return end and end._replace(value=Interval(*(self.scale * value for value in end.value)))


_TRAINING = (
    Chart("Success, training", "% of episodes", "training/success_rate", scale=100),
    Chart("Return, training", "mean per episode", "training/return"),
)
_FURTHER = (
    Chart("Intrinsic return", "mean per episode", "training/intrinsic_return"),
    Chart("Gain by tips", "scaled return, with minus without", "empo2/tip_gain"),
    Chart("Memory", "tips stored", "empo2/memory_size"),
    Chart("Tips shown", "per call", "empo2/tips_injected_per_call"),
    Chart("Masked", "% of off-policy tokens", "empo2/masked_token_fraction", scale=100),
    Chart("Entropy", "nats per token", "actor/entropy"),
    Chart("Time", "s per step", "timing_s/step"),
)


def validation_charts(lines: Sequence[Line]) -> list[Chart]:
    """Return the charts of the validations that any line has: of all tasks, and of each panel."""
    measured = {key for line in lines for run in line.runs for row in run.rows for key in row}
    measured = {key for key in measured if not key.startswith("val/agent/")}  # an agent names its metrics as it likes
    charts = []
    for name, unit, scale in (("success_rate", "% of episodes", 100), ("return", "mean per episode", 1)):
        prefixes = {key.removesuffix(name) for key in measured if re.fullmatch(rf"val/(.+/)?{name}", key)}
        panels = prefixes - {"val/", f"val/{TRAIN_PANEL}/"}
        if len(panels) == 1 and all(
            line.measured(f"{min(panels)}{name}") == line.measured(f"val/{name}") for line in lines
        ):
            prefixes -= {"val/"}  # it is that panel
        for prefix in sorted(prefixes):
            panel = prefix.removeprefix("val/").rstrip("/")
            tasks = {"": "validation", TRAIN_PANEL: "training tasks", UNSEEN_PANEL: "unseen tasks"}.get(panel, panel)
            title = f"{'Return' if name == 'return' else 'Success'}, {tasks}"
            charts.append(Chart(title, unit, f"{prefix}{name}", f"{prefix}memory_{name}", scale))
    return charts


def charts_of(lines: Sequence[Line]) -> list[Chart]:
    """Return the charts for which any line has values, the most important ones first."""
    charts = [*validation_charts(lines), *_TRAINING, *_FURTHER]
    return [chart for chart in charts if any(line.measured(chart.key) for line in lines)]


def drawing(chart: Chart, lines: Sequence[Line]) -> str:
    """Return a chart as an ``<svg>`` element without title, unit and legend, in the colors of the page around it.

    Line i has the color ``var(--line-i)``, everything else that of the text.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colors = [f"#{0xFACE00 + number:06x}" for number in range(len(lines))]  # each stands for a variable
    style: dict[Any, Any] = {f"{part}.color": _TEXT for part in ("text", "xtick", "ytick", "grid")}
    style |= {"axes.edgecolor": _TEXT, "axes.labelcolor": _TEXT, "axes.grid": True, "grid.alpha": 0.15}
    style |= {"svg.fonttype": "none", "svg.hashsalt": chart.title, "legend.frameon": False, "legend.fontsize": 8}
    with rc_context(style):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = figure.subplots()
        _draw(axes, chart, lines, colors)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub("<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # figure_1 and the like are in every drawing
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg)  # the page sets its size
    svg = svg.replace(_TEXT, "currentColor")
    for number, color in enumerate(colors):
        svg = svg.replace(color, f"var(--line-{number})")
    return svg


def _draw(axes: "Axes", chart: Chart, lines: Sequence[Line], colors: Sequence[str]) -> None:
    heights: list[float] = []
    for number, line in enumerate(lines):
        color = colors[number]
        for key, style in ((chart.key, "-"), (chart.with_tips, "--")):
            steps, intervals = line.curve(key) if key else ([], [])
            if not steps:
                continue
            mean, low, high = chart.scale * np.array(intervals).T
            marker = "." if len(steps) <= _FEW else None
            axes.plot(steps, mean, linestyle=style, color=color, marker=marker, linewidth=1.5)
            if np.isfinite(low).any():
                axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            heights += [chart.scale * value for run in line.measured(key or "") for value in run.values()]
    if chart is _TRAINING[-1] and len(lines) == len(lines[0].runs) == 1:
        _mark_modes(axes, lines[0], colors[0])
    if chart.key.endswith("success_rate"):
        axes.set_ylim(-3, 103)
    elif heights:  # the interval of two seeds can be many times as high as all that was measured
        room = 0.06 * (max(heights) - min(heights)) or 0.5
        axes.set_ylim(min(heights) - room, max(heights) + room)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)


def _mark_modes(axes: "Axes", line: Line, color: str) -> None:
    rows = [row for row in line.runs[0].rows if "training/return" in row]
    for mode, marker in _MODES.items():
        points = [(row["step"], row["training/return"]) for row in rows if step_mode(row) == mode]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, color=color, s=20, zorder=3, label=mode)
