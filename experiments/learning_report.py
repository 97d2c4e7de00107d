"""The tables and the pictures of docs/learning.md, from what experiments/learning.py has kept so far."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from learning_notes import KINDS
from learning_plan import (
    BEST,
    FROZEN,
    SCORE,
    WARM,
    all_jobs,
    chosen,
    development,
    file_of,
    needed,
    provisional,
    reached_in,
    read_rows,
)
from learning_statistics import Curve, curve, first_reach, mean_curve, over_blocks, over_seeds_and_houses, p_of_pairs

KEPT = ("step", "training/", "val/", "empo2/", "actor/", "rollout_corr/", "timing_s/step")
ALONE, WITH_NOTES, DELETED = "train, no notes", "train, notes", "memory off"
UNSEEN, UNSEEN_WITH_NOTES = "unseen, no notes", "unseen, notes"
NOTES_CURVE, UNSEEN_CURVE = "val/train/memory_success_rate", "val/success_rate"
FLAT = "empo2/groups_without_gradient"
START = "start.json"
EPISODES = (48, 96)  # of a house: half of a training, and all of it
PLAYED = ("claim", "described", "retention", "form")  # stages whose runs play the same houses
SEEN = {
    "groups without a gradient": (FLAT, "{:.0%}"),
    "episodes with notes": ("empo2/memory_fraction", "{:.0%}"),
    "off-policy episodes": ("empo2/off_policy_fraction", "{:.0%}"),
    "masked tokens": ("empo2/masked_token_fraction", "{:.1%}"),
    "entropy without notes": ("empo2/without_tips/entropy", "{:.3f}"),
    "gap, off-policy": ("empo2/off_policy/old_kl", "{:.3f}"),
    "with notes": ("empo2/with_tips/old_kl", "{:.4f}"),
    "without notes": ("empo2/without_tips/old_kl", "{:.4f}"),
}
"""By heading, a metric of a training step and its form. gap: mean of log pi_old - log pi_theta, by kind of row."""
BEGIN, END = "<!-- made by experiments/learning.py report -->", "<!-- end -->"
PICTURES = {"The arms in houses in disguise": "learning.png", "Why, and where else": "learning-more.png"}
COLORS = ("#8C8C8C", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#222222")
BANDS = 3  # curves of a picture that have one; more hide each other
MARKED = 50  # points of a curve that is drawn with its points
DETAILS = """# The learning experiment's details

Made by experiments/learning.py report; docs/learning.md says what the runs showed. *Gap*: mean of
log pi_old - log pi_theta in the tokens of a kind of row; off-policy pi_old is taken with notes, pi_theta without."""
CAPTION = "Curves are means over seeds; the bands of each picture's first three arms span them."


@dataclass(frozen=True)
class Run:
    """What is kept of a training. rows: metrics by step. facts: NAME.json. probes: lines of experiments/probe.py."""

    rows: Sequence[Mapping[str, float]]
    facts: Mapping[str, Any]
    probes: Sequence[Mapping[str, Any]]

    def houses(self, part: str, scored: int) -> np.ndarray:
        """Return success by house [houses], in the order of their seeds: the mean of the last `scored` validations."""
        steps = sorted(self.facts["validations"], key=int)[-scored:]
        return np.mean([shares(self.facts["validations"][step][part]) for step in steps], axis=0)


def shares(counts: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Return the share of episodes that succeeded in each house [houses], in the order of their seeds."""
    return np.array([hits / episodes for _, (hits, episodes) in sorted(counts.items(), key=lambda each: int(each[0]))])


class Kept:
    """All that is kept, by name."""

    def __init__(self, plan: Mapping[str, Any], results: Path) -> None:
        self.plan, self.results = plan, results

    def run(self, arm: str, seed: int) -> Run | None:
        name = f"{arm}-{seed}"
        file, probes = self.results / f"{name}.jsonl", self.results / f"{name}.probe.jsonl"
        if not file.is_file():
            return None
        facts = json.loads((self.results / f"{name}.json").read_text())
        return Run(read_rows(file), facts, read_rows(probes) if probes.is_file() else [])

    def runs(self, stage: str, arm: str) -> dict[int, Run]:
        """Return an arm's runs by seed."""
        found = {seed: self.run(arm, seed) for seed in self.plan["stages"][stage]["seeds"]}
        return {seed: run for seed, run in found.items() if run}

    def parts(self, name: str) -> dict[str, np.ndarray] | None:
        """Return success by house [houses] in each part of an evaluation or fine-tuning; None if there is none."""
        facts = self.facts(name)
        return {part: shares(counts) for part, counts in facts["parts"].items()} if facts else None

    def facts(self, name: str) -> dict[str, Any] | None:
        """Return NAME.json; None if there is none."""
        file = self.results / f"{name}.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def arms(self, *stages: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield stage, name and values of the stages' arms."""
        for stage in stages:
            for arm, values in self.plan["stages"][stage]["arms"].items():
                yield stage, arm, values

    def by_house(self, stage: str, arm: str, part: str) -> dict[int, np.ndarray]:
        """Return by seed success by house [houses] in the scored validations, or after the memory was deleted."""
        if part == DELETED:
            found = {seed: self.parts(f"{arm}-{seed}.deleted") for seed in self.plan["stages"]["deleted"]["seeds"]}
            return {seed: parts[DELETED] for seed, parts in found.items() if parts}
        scored = self.plan["stages"][stage]["scored"]
        return {seed: run.houses(part, scored) for seed, run in self.runs(stage, arm).items()}


def write_report(plan: Mapping[str, Any], results: Path, docs: Path) -> None:
    """Write what is concluded from into docs/learning.md between the marks, and what explains it beside the data.

    The pictures are drawn once the claim has runs.
    """
    kept = Kept(plan, results)
    made = [table_of_arms(kept, *PLAYED, "mapreader")]
    if any(kept.runs("claim", arm) for _, arm, _ in kept.arms("claim")):
        for (text, file), drawn in zip(PICTURES.items(), (draw_arms, draw_more), strict=True):
            drawn(kept, docs / file)
            made.append(f"![{text}]({file})")
        made.append(CAPTION)
    between(docs / "learning.md", BEGIN, made)
    details = [
        missing(kept),
        claims(kept),
        frozen_start(kept),
        table_of_arms(kept, "generalisation"),
        table_of_adaptation(kept),
        table_of_development(kept),
        table_of_updates(kept),
        table_of_probes(kept),
        table_of_notes(kept),
    ]
    write_details(results, DETAILS, details)


def write_details(results: Path, begin: str, details: Sequence[str]) -> None:
    """Write a page beside the data: its beginning, and the parts that are not empty."""
    (results / "README.md").write_text("\n\n".join((begin, *filter(None, details))) + "\n")


def between(page: Path, begin: str, made: Sequence[str]) -> None:
    """Replace what stands in a page between a mark and the next END by the parts that are not empty."""
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(END)
    page.write_text("\n\n".join((before + begin, *filter(None, made), END + after)))


def missing(kept: Kept) -> str:
    """Return a line for each stage of which something is not kept yet."""
    plan = kept.plan
    there: dict[str, list[bool]] = {}
    for job in all_jobs(plan, Path(), partial(provisional, plan, kept.results)):
        there.setdefault(job.stage, []).append(file_of(job, kept.results).is_file())
    lines = [f"- {stage}: {sum(found)} of {len(found)}" for stage, found in there.items() if not all(found)]
    return "Kept of what was planned, where something is missing below:\n\n" + "\n".join(lines) if lines else ""


def frozen_start(kept: Kept) -> str:
    """Return how many houses the untrained start would find by chance, from what `learning.py start` has written."""
    file = kept.results / START
    if not file.is_file():
        return ""
    chances = np.array([chance for houses in json.loads(file.read_text()).values() for chance in houses.values()])
    found = [f"{np.sum(1 - (1 - chances) ** episodes):.1f} in {episodes}" for episodes in EPISODES]
    return (
        f"The untrained start goes the way of a house without notes in {100 * chances.mean():.2g} % of its episodes"
        f" (lowest {100 * chances.min():.2g} %). Of the coins of {len(chances)} houses it would find"
        f" {' and '.join(found)} episodes a house."
    )


def table_of_development(kept: Kept) -> str:
    """Return the scores on which rates and form are chosen."""
    plan = kept.plan
    scored = plan["stages"]["development"]["scored"]
    files = {(job.like, job.rate): (job, file_of(job, kept.results)) for job in development(plan, plan["arms"], Path())}
    tried = {place: each for place, each in files.items() if place[1] != FROZEN}
    found = {place: reached_in(job, file, scored) for place, (job, file) in tried.items() if file.is_file()}
    if not found:
        return ""
    rates = sorted({rate for _, rate in tried})
    rows = [
        [values["title"], *(f"{100 * found[arm, rate]:.0f} %" if (arm, rate) in found else "-" for rate in rates)]
        for arm, values in plan["arms"].items()
        if any((arm, rate) in found for rate in rates)
    ]
    told = markdown(["development: success without notes", *(f"{rate:.0e}" for rate in rates)], rows)
    if not plan["forms"]:
        return told
    try:
        best, rate = chosen(plan, kept.results, needed(plan))[BEST]
    except SystemExit:
        return told
    return f"{told}\n\nThe best form is *{plan['arms'][best]['title']}*, with {rate:.0e}."


def table_of_arms(kept: Kept, *stages: str) -> str:
    """Return success at the end by arm of the stages, with intervals over seeds and houses."""
    rows = []
    for stage, arm, values in kept.arms(*stages):
        if found := kept.runs(stage, arm):
            unseen = stage == "generalisation"
            with_notes, alone = (UNSEEN_WITH_NOTES, UNSEEN) if unseen else (WITH_NOTES, ALONE)
            parts = (with_notes if values.get("notes") else None, alone, DELETED)
            by_part = [kept.by_house(stage, arm, part) if part else {} for part in parts]
            cells = [interval(each, same_houses=unseen) for each in by_part]
            cells[-1] += of_seeds(by_part[-1], found)
            minutes = np.mean([run.rows[-1]["cpu_seconds"] for run in found.values()]) / 60
            rate = f"{next(iter(found.values())).facts['rate']:.0e}"
            title = values["title"] + ": unseen houses" * unseen
            rows.append([title, str(len(found)), rate, *cells, f"{minutes:.0f}"])
    head = ["arm", "seeds", "rate", "with notes", "without notes", "memory deleted", "CPU minutes"]
    return markdown(head, rows) if rows else ""


def of_seeds(part: Mapping[int, Any], of: Mapping[int, Any]) -> str:
    """Return how many of an arm's seeds a cell is of; "" if of all or none."""
    return f", {len(part)} of {len(of)} seeds" * (0 < len(part) < len(of))


def claims(kept: Kept) -> str:
    """Return each claim with what was found, or that it is not measured yet."""
    found = {"C1": primary, "C2": deleted, "C3": adapted, "C4": followed, "C5": generalised, "C6": reached}
    lines = [f"- **{name}** {' '.join(text.split())} {found[name](kept) or '*Not measured yet.*'}"
             for name, text in kept.plan["claims"].items()]  # fmt: skip
    return "\n".join(lines)


def primary(kept: Kept) -> str:
    told = [against(kept, arm) for arm in ("bonus", "grpo")]
    return f"*Against GRPO + 1/n {told[0]}{told[1] and f'. Against GRPO {told[1]}'}.*" if told[0] else ""


def against(kept: Kept, arm: str) -> str:
    """Return EMPO²'s differences from an arm of the claim by seed, and the tests of the planned seeds and of all."""
    pairs = paired(kept.by_house("claim", "empo2", ALONE), kept.by_house("claim", arm, ALONE))
    if not pairs:
        return ""
    seeds = [100 * float(each.mean()) for each in pairs.values()]
    told = [f"seed by seed {', '.join(f'{each:+.0f}' for each in seeds)}"]
    for count in sorted({min(len(seeds), kept.plan["stages"]["claim"]["tested"]), len(seeds)}):
        first = dict(list(pairs.items())[:count])
        p = f"p = {p_of_pairs(seeds[:count]):.4f}, at best {2 / 2**count:.4f}"
        told.append(f"mean of {count} seeds {points(first)}, {p}")
    return "; ".join(told)


def deleted(kept: Kept) -> str:
    on_policy = kept.by_house("described", "on-policy", DELETED)
    pairs = paired(kept.by_house("claim", "empo2", DELETED), on_policy)
    if not pairs:
        return ""
    told = f"Difference {points(pairs)}, {len(pairs)} seeds"
    if same := paired(kept.by_house("described", "paper", DELETED), on_policy):
        told += f"; of the same form, as in the paper, with and without off-policy steps {points(same)}"
    return f"*{told}.*"


def adapted(kept: Kept) -> str:
    own = trials(kept, "empo2", "write")
    if not own:
        return ""
    gain = {seed: each[-1] - each[0] for seed, each in own.items()}
    told = [f"gain {points(gain, same_houses=True)}"]
    for kind, name in (("off", "without memory"), ("other", "another house's notes")):
        control = {seed: each[-1] - each[0] for seed, each in trials(kept, "empo2", kind).items()}
        if more := paired(gain, control):
            told.append(f"more than {name} by {points(more, same_houses=True)}")
    if beside := against_start(kept, "empo2"):
        told.append(f"in the fourth trial {beside} against the warm start")
    return f"*EMPO²: {'; '.join(told)}.*"


def against_start(kept: Kept, model: str) -> str:
    """Return how a model's last trial with own notes differs from the warm start's, house by house; "" without both."""
    starts, own = trials(kept, WARM, "write"), trials(kept, model, "write")
    beside = {seed: each[-1] - start[-1] for start in starts.values() for seed, each in own.items()}
    return points(beside, same_houses=True) if beside else ""


def followed(kept: Kept) -> str:
    told = []
    for stage, arm, values in kept.arms(*PLAYED):
        runs = kept.runs(stage, arm).values()
        changes = {number: np.array([_of(lines[-1], "action") - _of(lines[0], "action")])
                   for number, run in enumerate(runs) if (lines := run.probes)}  # fmt: skip
        if changes and values.get("notes"):
            told.append(f"{values['title']} {points(changes)}")
    return f"*{'; '.join(told)}.*" if told else ""


def generalised(kept: Kept) -> str:
    told = []
    for arm in ("grpo-64", "empo2-64"):
        if found := kept.by_house("generalisation", arm, UNSEEN):
            runs = kept.runs("generalisation", arm).values()
            start = np.mean([curve(run.rows, UNSEEN_CURVE)[1][0] for run in runs])
            title = kept.plan["stages"]["generalisation"]["arms"][arm]["title"]
            told.append(f"{title}: {interval(found, same_houses=True)}, from {100 * start:.0f} % at the start")
    return f"*{'; '.join(told)}.*" if told else ""


def reached(kept: Kept) -> str:
    bonus, empo2 = (list(kept.runs("claim", arm).values()) for arm in ("bonus", "empo2"))
    if not bonus or not empo2:
        return ""
    level = np.mean([houses.mean() for houses in kept.by_house("claim", "bonus", ALONE).values()])
    told = []
    for name, runs in (("EMPO²", empo2), ("GRPO + 1/n", bonus)):
        step, seconds = (
            first_reach(mean_curve([curve(run.rows, SCORE, against) for run in runs]), float(level))
            for against in ("step", "cpu_seconds")
        )
        told.append(f"{name} {'never' if math.isnan(step) else f'at step {step:.0f}, {seconds / 60:.0f} CPU minutes'}")
    return f"*{100 * level:.0f} %: {'; '.join(told)}.*"


def table_of_updates(kept: Kept) -> str:
    """Return what the updates were made from: means over all steps and seeds."""
    rows = []
    for stage, arm, values in kept.arms(*PLAYED):
        lines = [row for run in kept.runs(stage, arm).values() for row in run.rows if FLAT in row]
        if lines:
            cells = []
            for metric, form in SEEN.values():
                found = [row[metric] for row in lines if metric in row]
                cells.append(form.format(np.mean(found)) if found else "-")
            rows.append([values["title"], *cells])
    return markdown(["means over steps and seeds", *SEEN], rows) if rows else ""


def table_of_probes(kept: Kept) -> str:
    """Return the probability of a true note's actions with and without it, first and last; means over seeds."""
    heads = [("the note's action, with the note", "with_note", "action"), ("without it", "without_note", "action"),
             ("its whole way, with the note", "with_note", "way"), ("without it", "without_note", "way")]  # fmt: skip
    rows = []
    for stage, arm, values in kept.arms(*PLAYED):
        if found := [run.probes for run in kept.runs(stage, arm).values() if run.probes]:
            pairs = [[np.mean([_of(lines[at], what, which) for lines in found]) for at in (0, -1)]
                     for _, which, what in heads]  # fmt: skip
            rows.append([values["title"], str(len(found)), *(f"{start:.2f}, {end:.2f}" for start, end in pairs)])
    return (
        markdown(["probability, at the start and at the end", "seeds", *(head for head, _, _ in heads)], rows)
        if rows
        else ""
    )


def _of(line: Mapping[str, Any], what: str, which: str = "with_note") -> float:
    return float(line[which][what])


def table_of_notes(kept: Kept) -> str:
    """Return how often training episodes found the coin, by what their notes said of it, over all seeds."""
    rows = []
    for stage, arm, values in kept.arms(*PLAYED):
        told = [run.facts["notes"] for run in kept.runs(stage, arm).values() if "notes" in run.facts]
        counts = [np.sum([notes[kind] for notes in told], axis=0) for kind in KINDS] if told else []
        if any(episodes for _, episodes in counts):
            cells = [f"{100 * found / episodes:.0f} % of {episodes}" if episodes else "-" for found, episodes in counts]
            rows.append([values["title"], *cells])
    return markdown(["coin found, if notes tell of", *KINDS], rows) if rows else ""


def table_of_adaptation(kept: Kept) -> str:
    """Return success on new houses by trial with own notes, what it is made of, and the controls' last trials.

    A house is known if an episode of an earlier trial found its coin.
    """
    stage, titles, rows = kept.plan["stages"]["adaptation"], titles_of_models(kept), []
    controls = {"off": "no memory, last trial", "other": "another house's notes, trial 2"}
    crossed = {"own": "all its notes, once more", "of-start": "the start's", "by-start": "its notes, read by the start"}
    controls |= crossed if stage.get("crossed") else {}
    for model in (WARM, *stage["of"]):
        if found := trials(kept, model, "write"):
            cells = [interval(each, same_houses=True) for each in by_trial(found)]
            known = np.array([(each[:-1] > 0).any(axis=0) for each in found.values()])
            last = np.array([each[-1] for each in found.values()])
            cells += [f"{100 * known.mean():.0f} %", f"{100 * last[known].mean():.0f} %" if known.any() else "-"]
            for kind in controls:
                control = trials(kept, model, kind)
                cells.append(interval(by_trial(control)[-1], same_houses=True) if control else "-")
            alone = [(each > 0).any(axis=0).sum() for each in trials(kept, model, "off").values()]
            rows.append([f"{titles[model]}: own notes", str(len(found)), *cells, ", ".join(map(str, alone)) or "-"])
    head = ["adaptation", "models", *(f"trial {number}" for number in range(1, stage["trials"] + 1))]
    head += ["houses known before it", "success in these", *controls.values()]
    return markdown([*head, "houses found in all trials without memory"], rows) if rows else ""


def by_trial(found: Mapping[int, np.ndarray]) -> list[dict[int, np.ndarray]]:
    """Return for each trial success by house [houses] of each seed."""
    return [dict(zip(found, each, strict=True)) for each in zip(*found.values(), strict=True)]


def titles_of_models(kept: Kept) -> dict[str, str]:
    """Return the titles of what adapts, by arm: the warm start last."""
    stages = [stage for stage in ("claim", "retention", "meta") if stage in kept.plan["stages"]]
    return {arm: values["title"] for _, arm, values in kept.arms(*stages)} | {WARM: "the warm start"}


def trials(kept: Kept, model: str, kind: str) -> dict[int, np.ndarray]:
    """Return by seed of the model success by trial and house [trials, houses]; the warm start has seed 0."""
    names = {0: WARM} if model == WARM else {s: f"{model}-{s}" for s in kept.plan["stages"]["adaptation"]["seeds"]}
    found = {seed: kept.parts(f"{name}.{kind}") for seed, name in names.items()}
    return {
        seed: np.array([parts[f"seed 0, trial {trial}, tasks"] for trial in range(len(parts))])
        for seed, parts in found.items()
        if parts
    }


def paired(a: Mapping[int, np.ndarray], b: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return the differences by house of the seeds that both have."""
    return {seed: a[seed] - b[seed] for seed in a if seed in b}


def interval(by_seed: Mapping[int, np.ndarray], *, same_houses: bool = False) -> str:
    """Return the mean in percent with its interval over seeds and houses; - where there is none."""
    if not by_seed:
        return "-"
    found = over_seeds_and_houses(np.array(list(by_seed.values())), same_houses=same_houses)
    return f"{100 * found.mean:.0f} % ({100 * found.low:.0f} to {100 * found.high:.0f})"


def points(by_seed: Mapping[int, np.ndarray], *, same_houses: bool = False) -> str:
    """Return a mean difference in points with its interval."""
    found = over_seeds_and_houses(np.array(list(by_seed.values())), same_houses=same_houses)
    return f"{100 * found.mean:+.0f} points ({100 * found.low:+.0f} to {100 * found.high:+.0f})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


# Pictures


class Panel(NamedTuple):
    """Curves by title, one for each seed, of which the mean and the range are drawn, in per cent."""

    title: str
    below: str
    beside: str
    curves: Mapping[str, Sequence[Curve]]
    first: int = 0


def draw_arms(kept: Kept, target: Path) -> None:
    """Draw success without notes and with them, and groups that teach nothing, of the arms with houses in disguise."""
    percent = "coin found, % of episodes"
    panels = (
        Panel("Without notes", "step", percent, curves_of(kept, PLAYED, SCORE)),
        Panel("With notes", "step", percent, curves_of(kept, PLAYED, NOTES_CURVE)),
        Panel("Groups without a gradient", "step", "% of groups", curves_of(kept, PLAYED, FLAT, block=8)),
    )
    draw(panels, target)


def draw_more(kept: Kept, target: Path) -> None:
    """Draw whether notes are followed, success on houses never trained on, and success by trial of the adaptation."""
    adapting = {
        title: [(np.arange(1, 1 + len(each)), each.mean(axis=1)) for each in trials(kept, arm, "write").values()]
        for arm, title in titles_of_models(kept).items()
    }
    follows = {
        values["title"]: [
            (np.array([line["step"] for line in run.probes]), np.array([_of(line, "action") for line in run.probes]))
            for run in kept.runs(stage, arm).values()
            if run.probes
        ]
        for stage, arm, values in kept.arms(*PLAYED)
    }
    unseen = curves_of(kept, ("generalisation",), UNSEEN_CURVE)
    panels = (
        Panel("A true note's action, with the note", "step", "probability, %", follows),
        Panel("Unseen houses, without notes", "step", "coin found, % of episodes", unseen),
        Panel("New houses, frozen weights, own notes", "trial", "coin found, % of episodes", adapting, first=1),
    )
    draw(panels, target)


def curves_of(kept: Kept, stages: Sequence[str], metric: str, block: int = 1) -> dict[str, list[Curve]]:
    return {
        values["title"]: [
            over_blocks(points, block)
            for run in kept.runs(stage, arm).values()
            if len((points := curve(run.rows, metric))[0]) >= block
        ]
        for stage, arm, values in kept.arms(*stages)
    }


def draw(panels: Sequence[Panel], target: Path) -> None:
    """Draw means over seeds, and bands that span them; lines are dashed once the colors are used up."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = list(dict.fromkeys(title for panel in panels for title, curves in panel.curves.items() if curves))
    looks = {title: (COLORS[i % len(COLORS)], ("-", "--")[i // len(COLORS)]) for i, title in enumerate(titles)}
    with plt.rc_context({"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 9}):
        figure, grid = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4.2), layout="constrained")
        for axes, panel in zip(grid, panels, strict=True):
            shown = {title: curves for title, curves in panel.curves.items() if curves}
            for number, (title, curves) in enumerate(shown.items()):
                x, _ = mean_curve(curves)
                heights = 100 * np.array([y[: len(x)] for _, y in curves])
                color, line = looks[title]
                marker = "." if len(x) <= MARKED else ""
                axes.plot(x, heights.mean(axis=0), line, color=color, marker=marker, linewidth=2, label=title)
                if number < BANDS:
                    axes.fill_between(x, heights.min(axis=0), heights.max(axis=0), color=color, alpha=0.15)
            axes.set_title(panel.title, loc="left", weight="bold", fontsize=10)
            axes.set_xlabel(panel.below)
            axes.set_ylabel(panel.beside)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlim(left=panel.first)
            axes.locator_params(axis="x", integer=True)
            axes.set_ylim(-3, 103)
        found = {label: line for axes in grid for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=3, handlelength=4)
        figure.savefig(target, dpi=130)
        plt.close(figure)
