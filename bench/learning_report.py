"""The picture and the tables of docs/learning.md, from the results in bench/learning/."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from empo2.recipe.evaluation.statistics import area, over_seeds

KEPT = ("step", "training/success_rate", "training/return", "training/intrinsic", "val/", "empo2/", "timing_s/step")
ALONE, WITH_MEMORY, UNSEEN = "val/train/success_rate", "val/train/memory_success_rate", "val/unseen/success_rate"
BEGIN, END = "<!-- made by bench/learning.py report -->", "<!-- end -->"

type Curve = tuple[np.ndarray, np.ndarray]
"""Steps [n] and values [n]."""


def curve(rows: Sequence[Mapping[str, float]], metric: str, against: str = "step") -> Curve:
    """Return a metric of one run against its steps, or against another metric."""
    points = [(row[against], row[metric]) for row in rows if metric in row]
    return np.array([x for x, _ in points]), np.array([y for _, y in points])


def first_reach(points: Curve, height: float) -> float:
    """Return the first measured step at which a curve is at least `height`; nan if it never is."""
    steps, values = points
    reached = steps[values >= height]
    return float(reached[0]) if len(reached) else math.nan


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of several runs' curves at the steps that all of them have."""
    steps = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in curves)))
    return np.array(steps), np.mean([[v[s.tolist().index(step)] for step in steps] for s, v in curves], axis=0)


def write_report(plan_file: Path, results: Path, docs: Path) -> None:
    """Write docs/learning.png, and the tables into docs/learning.md between the marks.

    Raises:
        SystemExit: no run is finished.
    """
    arms = yaml.safe_load(plan_file.read_text())["arms"]
    runs = {
        name: [
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in sorted(results.glob(f"{name}-[0-9].jsonl"))
        ]
        for name in arms
    }
    runs = {name: found for name, found in runs.items() if found}
    if not runs:
        raise SystemExit(f"no result in {results}; make them with: bench/learning.py run")
    page = docs / "learning.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    picture = "![Success of each arm](learning.png)"
    page.write_text(f"{before}{BEGIN}\n\n{picture}\n\n{table(arms, runs)}\n{END}{after}")
    draw(arms, runs, docs / "learning.png")


def table(arms: Mapping[str, Any], runs: Mapping[str, Sequence[Any]]) -> str:
    """Return the comparison as a Markdown table; intervals are of the mean over seeds."""
    grpo = [curve(rows, ALONE) for rows in runs.get("grpo", ())]
    goal = float(np.mean([values[-1] for _, values in grpo])) if grpo else math.nan
    lines = [
        "| arm | seeds | success at the end | area under the curve | steps to GRPO's end | unseen houses | "
        "with memory | distance, largest and at the end | CPU minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in runs.items():
        alone = [curve(rows, ALONE) for rows in found]
        distances = [distance(rows) for rows in found if any(WITH_MEMORY in row for row in rows)]
        reach = first_reach(mean_curve(alone), goal)
        cells = [
            arms[name]["title"],
            str(len(found)),
            percent([values[-1] for _, values in alone]),
            percent([area(values.tolist(), steps.tolist()) for steps, values in alone]),
            "-" if math.isnan(reach) else f"{reach:.0f}",
            percent([curve(rows, UNSEEN)[1][-1] for rows in found]),
            percent([curve(rows, WITH_MEMORY)[1][-1] for rows in found]) if distances else "-",
            f"{percent([d.max() for d in distances])}, {percent([d[-1] for d in distances])}" if distances else "-",
            f"{np.mean([rows[-1]['cpu_seconds'] for rows in found]) / 60:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def distance(rows: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Return success with memory minus success without, at each validation of a run."""
    return curve(rows, WITH_MEMORY)[1] - curve(rows, ALONE)[1]


def percent(values: Sequence[float]) -> str:
    """Return the mean in percent, with its interval if there are several values."""
    found = over_seeds(values)
    return f"{100 * found.mean:.0f} %" + ("" if math.isnan(found.high) else f" ± {100 * (found.high - found.mean):.0f}")


def draw(arms: Mapping[str, Any], runs: Mapping[str, Sequence[Any]], target: Path) -> None:
    """Draw success without memory by steps and by CPU time, and success with memory; bands span the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("Training houses, without notes", ALONE, "step", "step", 1),
        ("The same, by computing time", ALONE, "cpu_seconds", "CPU minutes", 60),
        ("Training houses, with notes", WITH_MEMORY, "step", "step", 1),
        ("Unseen houses, without notes", UNSEEN, "step", "step", 1),
    )
    colors = dict(
        zip(arms, ("#8C8C8C", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222"), strict=True)
    )
    with plt.rc_context({"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 8}):
        figure, grid = plt.subplots(1, 4, figsize=(16, 4), sharey=True, layout="constrained")
        for axes, (title, metric, against, label, unit) in zip(grid, panels, strict=True):
            for name, found in runs.items():
                curves = [points for rows in found if len((points := curve(rows, metric, against))[0])]
                if not curves:
                    continue
                if len({len(x) for x, _ in curves}) == 1:
                    x, heights = np.mean([x for x, _ in curves], axis=0) / unit, 100 * np.array([y for _, y in curves])
                    axes.plot(
                        x,
                        heights.mean(axis=0),
                        color=colors[name],
                        marker=".",
                        label=arms[name]["title"],
                        linewidth=2 if len(curves) > 1 else 1,
                        linestyle="-" if len(curves) > 1 else ":",
                    )
                    axes.fill_between(x, heights.min(axis=0), heights.max(axis=0), color=colors[name], alpha=0.15)
            axes.set_title(title, loc="left", weight="bold")
            axes.set_xlabel(label)
            axes.spines[["top", "right"]].set_visible(False)
        grid[0].set_ylabel("coin found, % of episodes")
        grid[0].set_ylim(-3, 103)
        grid[0].legend()
        figure.savefig(target, dpi=130)
        plt.close(figure)
