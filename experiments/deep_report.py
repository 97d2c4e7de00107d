"""The tables and the picture of the experiment in deep houses, from what is kept so far."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from learning_plan import FROZEN, SCORE
from learning_report import (
    ALONE,
    DELETED,
    NOTES_CURVE,
    WITH_NOTES,
    Kept,
    Panel,
    Run,
    against_start,
    between,
    curves_of,
    draw,
    frozen_start,
    interval,
    markdown,
    missing,
    of_seeds,
    paired,
    points,
    table_of_adaptation,
    table_of_development,
    titles_of_models,
    write_details,
)
from learning_statistics import Curve, curve, first_reach, p_of_pairs

from empo2.agents.houses.tasks import coin_stream

BEGIN = "<!-- made by experiments/learning.py report --plan deep -->"
DETAILS = """# The details of the experiment in deep houses

Made by experiments/learning.py report --plan deep; docs/learning.md says what the runs showed."""
STAGES = ("claim", "passes", "replay", "holding", "imitation", "described")
PICTURE = "deep.png"
OURS, PRIMARY, BESIDE = "internalise", ("grpo", "tuned"), "tuned-memory"


def write_deep_report(plan: Mapping[str, Any], results: Path, docs: Path) -> None:
    """Write verdicts, arms and picture into docs/learning.md between the marks, what explains them beside the data."""
    kept = Kept(plan, results)
    made = [frozen_start(kept), claims(kept), table_of_arms(kept)]
    if any(kept.runs("claim", arm) for _, arm, _ in kept.arms("claim")):
        draw_arms(kept, docs / PICTURE)
        made.append(f"![The arms in deep houses]({PICTURE})")
    between(docs / "learning.md", BEGIN, made)
    details = [missing(kept), table_of_adaptation(kept), adapted(kept), table_of_development(kept)]
    write_details(results, DETAILS, details)


def adapted(kept: Kept) -> str:
    """Return how the models' last trials with own notes differ from the start's, and what they found in training."""
    titles, models = titles_of_models(kept), kept.plan["stages"]["adaptation"]["of"]
    told = [f"{titles[model]} {beside}" for model in models if (beside := against_start(kept, model))]
    if not told:
        return ""
    args, found = kept.plan["stages"]["meta"]["settings"]["tasks"]["args"], []
    houses = len({row["seed"] for row in coin_stream(**args, block=1)[0]})
    for model in models:
        if runs := kept.runs("meta", model).values():
            coins = sum(len(run.facts["found"]) for run in runs)
            found.append(f"{titles[model]} {coins} of {houses * len(runs)}")
    last = f"In the last trial, against the warm start: {'; '.join(told)}."
    return f"{last} Houses found in training: {'; '.join(found)}."


def alone(kept: Kept, stage: str, arm: str) -> dict[int, np.ndarray]:
    """Return by seed success by house [houses] without notes at the end, of a training or a fine-tuning."""
    if "of" not in kept.plan["arms"][kept.plan["stages"][stage]["arms"][arm]["like"]]:
        return kept.by_house(stage, arm, ALONE)
    found = {seed: kept.parts(f"{arm}-{seed}") for seed in kept.plan["stages"][stage]["seeds"]}
    return {seed: by_house for seed, parts in found.items() if parts for by_house in parts.values()}


def claims(kept: Kept) -> str:
    """Return the differences from EMPO² of the arms that it is compared with, and the tests of D1 and D2."""
    titles = {arm: values["title"] for _, arm, values in kept.arms("claim")}
    pairs = {arm: paired(alone(kept, "claim", OURS), alone(kept, "claim", arm)) for arm in (*PRIMARY, BESIDE)}
    if not all(pairs.values()):
        return ""
    seeds = {arm: [100 * float(each.mean()) for each in found.values()] for arm, found in pairs.items()}
    corrected = holm({arm: p_of_pairs(seeds[arm]) for arm in PRIMARY})
    lines = []
    for arm, found in pairs.items():
        told = f"- against {titles[arm]}: {points(found)}, seed by seed {', '.join(f'{d:+.0f}' for d in seeds[arm])}"
        lines.append(f"{told}; p = {corrected[arm]:.4f} by Holm's correction for two" if arm in corrected else told)
    planned = len(kept.plan["stages"]["claim"]["seeds"])
    differs = "; ".join(f"by {np.mean(seeds[arm]):+.0f} points from {titles[arm]}" for arm in pairs)
    of = f"{min(map(len, seeds.values()))} of {planned} seeds"
    return "\n".join([f"Without notes at the end, {of}, {titles[OURS]} differs {differs}.", "", *lines])


def holm(found: Mapping[str, float]) -> dict[str, float]:
    """Return p-values by Holm's correction for as many tests: the smallest times their number, and so on upwards."""
    corrected, least = {}, 0.0
    for number, (name, p) in enumerate(sorted(found.items(), key=lambda each: each[1])):
        least = max(least, min(1.0, (len(found) - number) * p))
        corrected[name] = least
    return corrected


def table_of_arms(kept: Kept) -> str:
    """Return by arm success at the end, the houses whose coin was found in training, and how many notes were true."""
    rows = []
    for stage, arm, values in kept.arms(*STAGES):
        like = kept.plan["arms"][values["like"]]
        if not (found := alone(kept, stage, arm)):
            continue
        runs = [run for seed, run in kept.runs(stage, like.get("of", arm)).items() if seed in found]
        cells = [interval(kept.by_house(stage, arm, WITH_NOTES)) if values.get("notes") else "-", interval(found)]
        after = kept.by_house(stage, arm, DELETED) if "of" not in like else {}
        cells.append(interval(after) + of_seeds(after, found))
        cells.append(f"{sum(len(run.facts['found']) for run in runs)} of {sum(map(len, found.values()))}")
        true = np.sum([run.facts["notes_true"] for run in runs if "notes_true" in run.facts], axis=0)
        cells.append(f"{100 * true[0] / true[1]:.0f} % of {true[1]}" if np.size(true) == 2 else "-")
        cells.append("-" if "of" in like or like.get("rates") == [FROZEN] else half(runs))
        minutes = np.mean([cpu_minutes(run) for run in runs])
        if "of" in like and (own := fine_tuning_minutes(kept, stage, arm)):
            minutes += np.mean(own)
        rows.append([values["title"], str(len(found)), *cells, f"{minutes:.0f}"])
    head = ["arm", "seeds", "with notes", "without notes", "memory deleted", "houses found in training"]
    return markdown([*head, "distinct notes, true", "half by step", "CPU minutes"], rows) if rows else ""


def cpu_minutes(run: Run) -> float:
    """Return the CPU minutes of a run's steps: their median times their number, without validations and starts."""
    steps, seconds = ([row[name] for row in run.rows] for name in ("step", "cpu_seconds"))
    return float(np.median(np.diff(seconds))) * steps[-1] / 60


def fine_tuning_minutes(kept: Kept, stage: str, arm: str) -> list[float]:
    """Return the CPU minutes of an arm's fine-tunings, of those seeds of which they were counted."""
    facts = [kept.facts(f"{arm}-{seed}") or {} for seed in kept.plan["stages"][stage]["seeds"]]
    return [each["cpu_seconds"] / 60 for each in facts if "cpu_seconds" in each]


def half(runs: Sequence[Run]) -> str:
    """Return when half of the episodes without notes first succeeded, a mean over the runs in which they did."""
    steps = [step for run in runs if not math.isnan(step := first_reach(curve(run.rows, SCORE), 0.5))]
    return f"{np.mean(steps):.0f} ({len(steps)} of {len(runs)})" if steps else "never"


def draw_arms(kept: Kept, target: Path) -> None:
    """Draw success without notes and with them, and the houses found by the number of episodes."""
    percent = "coin found, % of episodes"
    panels = (
        Panel("Without notes", "step", percent, curves_of(kept, STAGES, SCORE) | fine_tuned(kept)),
        Panel("With notes", "step", percent, curves_of(kept, STAGES, NOTES_CURVE)),
        Panel("Found in training", "episodes of a house", "% of houses", finding(kept)),
    )
    draw(panels, target)


def fine_tuned(kept: Kept) -> dict[str, Sequence[Curve]]:
    """Return by title, for each seed, a fine-tuning's success without notes as a point at the last step."""
    found: dict[str, Sequence[Curve]] = {}
    for stage, arm, values in kept.arms(*STAGES):
        if "of" in kept.plan["arms"][values["like"]]:
            last = np.array([kept.plan["stages"][stage]["phases"][-1]["steps"]])
            ends = alone(kept, stage, arm).values()
            found[values["title"]] = [(last, np.array([by_house.mean()])) for by_house in ends]
    return found


def finding(kept: Kept) -> dict[str, Sequence[Curve]]:
    """Return by title, for each seed, the share of houses of which one of the first n episodes found the coin."""
    found: dict[str, Sequence[Curve]] = {}
    for stage, arm, values in kept.arms(*STAGES):
        settings = kept.plan["settings"]["algorithm"]
        houses = kept.plan["stages"][stage]["settings"]["tasks"]["args"]["train_houses"]
        steps = kept.plan["stages"][stage]["phases"][-1]["steps"]
        episodes = np.arange(steps * settings["tasks_per_step"] * settings["rollouts_per_task"] // houses + 1)
        found[values["title"]] = [
            (episodes, np.array([sum(first <= n for first in run.facts["found"].values()) / houses for n in episodes]))
            for run in kept.runs(stage, arm).values()
        ]
    return found
