"""The pictures and the tables of docs/learning.md, from the results in bench/learning/."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from learning_notes import KINDS, Outcomes

from empo2.recipe.evaluation.statistics import area, over_seeds

KEPT = (
    "step",
    "training/success_rate",
    "training/return",
    "training/intrinsic",
    "val/",
    "empo2/",
    "actor/",
    "timing_s/step",
)
ALONE, WITH_MEMORY, UNSEEN = "val/train/success_rate", "val/train/memory_success_rate", "val/unseen/success_rate"
FLAT = "empo2/groups_without_gradient"
SEEN = {
    "groups without a gradient": FLAT,
    "episodes with notes": "empo2/memory_fraction",
    "off-policy episodes": "empo2/off_policy_fraction",
    "masked tokens": "empo2/masked_token_fraction",
    "notes written a step": "empo2/tips_written",
    "notes shown an episode": "empo2/tips_per_episode",
}
"""By heading, a metric of a training step."""
NOTES = ".notes.json"
"""End of the name of a run's file that says what notes its episodes were shown (`learning_notes.Outcomes`)."""
BEGIN, END = "<!-- made by bench/learning.py report -->", "<!-- end -->"

PICTURES = {"Success of the arms": "learning.png", "By computing time, and every arm": "learning-arms.png"}
COLORS = ("#8C8C8C", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")

type Curve = tuple[np.ndarray, np.ndarray]
"""Steps [n] and values [n]."""
type Runs = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
"""By arm, the metrics of its runs: a row for each step."""


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
    """Write docs/learning*.png, and the tables into docs/learning.md between the marks.

    Raises:
        SystemExit: no run is finished.
    """
    arms = yaml.safe_load(plan_file.read_text())["arms"]
    runs = {
        name: [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        for name, files in files_by_arm(arms, results, ".jsonl").items()
    }
    if not runs:
        raise SystemExit(f"no result in {results}; make them with: bench/learning.py run")
    page = docs / "learning.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    pictures = [f"![{text}]({file})" for text, file in PICTURES.items()]
    shown = {
        name: [json.loads(file.read_text()) for file in files]
        for name, files in files_by_arm(runs, results, NOTES).items()
    }
    tables = table(arms, runs), table_of_updates(arms, runs), table_of_notes(arms, shown)
    made = pictures[0], *tables, pictures[1]
    page.write_text("\n\n".join((before + BEGIN, *made, END + after)))
    for draw, file in zip((draw_repeated, draw_arms), PICTURES.values(), strict=True):
        draw(arms, runs, docs / file)


def files_by_arm(arms: Iterable[str], results: Path, ending: str) -> dict[str, list[Path]]:
    """Return the files of each arm that has any, one for each seed, in the order of the seeds."""
    found = {name: sorted(results.glob(f"{name}-[0-9]{ending}")) for name in arms}
    return {name: files for name, files in found.items() if files}


def over_blocks(points: Curve, block: int) -> Curve:
    """Return the means of a curve over blocks of steps, each at its last step."""
    steps, values = (part[: len(part) // block * block].reshape(-1, block) for part in points)
    return steps[:, -1], values.mean(axis=1)


def table(arms: Mapping[str, Any], runs: Runs) -> str:
    """Return the comparison as a Markdown table; intervals are of the mean over seeds.

    CPU minutes are those of `repeated` arms.
    """
    grpo = [curve(rows, ALONE) for rows in runs.get("grpo", ())]
    goal = float(np.mean([values[-1] for _, values in grpo])) if grpo else math.nan
    several = repeated(arms, runs)
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
            f"{np.mean([rows[-1]['cpu_seconds'] for rows in found]) / 60:.0f}" if name in several else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_updates(arms: Mapping[str, Any], runs: Runs) -> str:
    """Return what the updates were made from as a Markdown table: means over all steps and seeds."""
    lines = [f"| arm | {' | '.join(SEEN)} |", "|---" * (1 + len(SEEN)) + "|"]
    for name, found in runs.items():
        steps = [row for rows in found for row in rows if FLAT in row]
        cells = []
        for heading, metric in SEEN.items():
            mean = np.mean([row.get(metric, 0.0) for row in steps])
            cells.append(f"{mean:.1f}" if heading.startswith("notes") else f"{100 * mean:.3g} %")
        lines.append(f"| {arms[name]['title']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_notes(arms: Mapping[str, Any], shown: Mapping[str, Sequence[Outcomes]]) -> str:
    """Return how often episodes found the coin, by what their notes said of it, as a Markdown table; over all seeds."""
    lines = [f"| coin found, if notes tell of | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    for name, runs in shown.items():
        cells = []
        for kind in KINDS:
            found, episodes = np.sum([run[kind] for run in runs], axis=0)
            cells.append(f"{100 * found / episodes:.0f} % of {episodes}" if episodes else "-")
        lines.append(f"| {arms[name]['title']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def distance(rows: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Return success with memory minus success without, at each validation of a run."""
    return curve(rows, WITH_MEMORY)[1] - curve(rows, ALONE)[1]


def percent(values: Sequence[float]) -> str:
    """Return the mean in percent, with its interval if there are several values."""
    found = over_seeds(values)
    return f"{100 * found.mean:.0f} %" + ("" if math.isnan(found.high) else f" ± {100 * (found.high - found.mean):.0f}")


def repeated(arms: Mapping[str, Any], runs: Runs) -> Runs:
    """Return the runs of the arms that have several seeds in the plan; they were trained on machines alike."""
    return {name: found for name, found in runs.items() if arms[name]["seeds"] > 1}


def draw_repeated(arms: Mapping[str, Any], runs: Runs, target: Path) -> None:
    """Draw the arms that have several seeds: success without notes and with them, and groups that teach nothing."""
    several = repeated(arms, runs)
    panels = (
        Panel("Training houses, without notes", ALONE, several),
        Panel("The same houses, with notes", WITH_MEMORY, several),
        Panel("Groups without a gradient, %", FLAT, several, block=8),
    )
    _draw(arms, panels, (1, 3), target)


def draw_arms(arms: Mapping[str, Any], runs: Runs, target: Path) -> None:
    """Draw success on unseen houses and by computing time, and all arms' first seeds."""
    first = {name: found[:1] for name, found in runs.items()}
    panels = (
        Panel("Unseen houses, without notes", UNSEEN, runs),
        Panel("Without notes, by computing time", ALONE, repeated(arms, runs), "cpu_seconds"),
        Panel("First seed of each arm: without notes", ALONE, first),
        Panel("First seed of each arm: with notes", WITH_MEMORY, first),
    )
    _draw(arms, panels, (2, 2), target)


class Panel(NamedTuple):
    """Runs' curves of a metric, of which the means over blocks of steps are drawn."""

    title: str
    metric: str
    runs: Runs
    against: str = "step"
    block: int = 1


def _draw(arms: Mapping[str, Any], panels: Sequence[Panel], shape: tuple[int, int], target: Path) -> None:
    """Draw means over seeds; bands span the seeds, and an arm with one seed is dotted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = dict(zip(arms, COLORS, strict=True))
    height, width = shape
    with plt.rc_context({"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 9}):
        figure, grid = plt.subplots(
            height, width, figsize=(4.2 * width, 3.4 * height + 0.4), sharey=True, squeeze=False, layout="constrained"
        )
        for axes, panel in zip(grid.flat, panels, strict=True):
            unit = 60 if panel.against == "cpu_seconds" else 1
            for name, found in panel.runs.items():
                curves = [over_blocks(curve(rows, panel.metric, panel.against), panel.block) for rows in found]
                curves = [points for points in curves if len(points[0])]
                if len({len(x) for x, _ in curves}) != 1:
                    continue
                x, heights = np.mean([x for x, _ in curves], axis=0) / unit, 100 * np.array([y for _, y in curves])
                style = {"linewidth": 2} if len(curves) > 1 else {"linewidth": 1.2, "linestyle": ":"}
                label = arms[name]["title"] + (f" ({len(curves)} seeds)" if len(curves) > 1 else "")
                axes.plot(x, heights.mean(axis=0), color=colors[name], marker=".", label=label, **style)
                axes.fill_between(x, heights.min(axis=0), heights.max(axis=0), color=colors[name], alpha=0.15)
            axes.set_title(panel.title, loc="left", weight="bold", fontsize=10)
            axes.set_xlabel("CPU minutes" if panel.against == "cpu_seconds" else "step")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylim(-3, 103)
            axes.set_xlim(left=0)
        for axes in grid[:, 0]:
            axes.set_ylabel("coin found, % of episodes")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(target, dpi=130)
        plt.close(figure)
