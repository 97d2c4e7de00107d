"""A plan, such as experiments/learning.yaml, as what is to be done: trainings in their order, and evaluations."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from empo2.recipe.config import lay_over, load_settings
from empo2.recipe.files.plan import Trial

ROOT = Path(__file__).parents[1]
PLANS = ("learning", "deep")
RESULTS = Path(__file__).parent  # a folder for each plan, of its name
SCORE = "val/train/success_rate"
CLAIM, BEST = "claim", "best"
WARM = "warm-start"
ADAPTATIONS = ("write", "off", "other")  # own notes; none; those of another house
OWN = "own"  # once more, all notes of its own
CROSSED = ("of-start", "by-start")  # the start's notes, read by the model; the model's, read by the start
FROZEN = 0.0  # the rate of an arm whose weights do not change


@dataclass(frozen=True)
class Training:
    """One run: an arm of a stage with a seed.

    like, rate: the arm of development whose settings it has, and the learning rate.
    phases: the settings until each phase's last step; all of one run.
    """

    stage: str
    arm: str
    like: str
    rate: float
    phases: tuple[Trial, ...]

    @property
    def name(self) -> str:
        return self.phases[0].name

    @property
    def seed(self) -> int:
        return self.phases[0].seed


@dataclass(frozen=True)
class Evaluation:
    """Episodes of a model with frozen weights. model: a training's name, or WARM."""

    stage: str
    kind: Literal["write", "off", "other", "own", "of-start", "by-start", "deleted"]
    model: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.model}.{self.kind}"


@dataclass(frozen=True)
class FineTuning:
    """The start, fine-tuned on the successes of the training `of`, and played: `samples` episodes a house."""

    stage: str
    arm: str
    like: str
    rate: float
    seed: int
    of: Training
    samples: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"


type Job = Training | FineTuning | Evaluation


def file_of(job: Job, results: Path) -> Path:
    """Return the file that is written when a job is done."""
    return results / f"{job.name}{'.jsonl' if isinstance(job, Training) else '.json'}"


def read_plan(name: str = PLANS[0]) -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text())


def all_jobs(
    plan: Mapping[str, Any], runs: Path, choose: Callable[[Collection[str]], Mapping[str, tuple[str, float]]]
) -> Iterator[Job]:
    """Yield what is to be made in its order: the claim, then the other stages, each after its arms' development.

    choose: given arms whose development has been yielded, returns as `chosen` does.
    """
    developed: set[str] = set()
    for stage in sorted(plan["stages"].keys() - {"development"}, key=[CLAIM, *plan["stages"]].index):
        arms = needed(plan, stage)
        yield from development(plan, arms - developed, runs)
        developed |= arms
        yield from later(plan, choose(developed), stage, runs)


def needed(plan: Mapping[str, Any], stage: str = CLAIM) -> set[str]:
    """Return the arms of development that a stage needs."""
    likes = {values["like"] for values in plan["stages"][stage].get("arms", {}).values()}
    return likes - {BEST} | (set(plan["forms"]) if BEST in likes else set())


def development(plan: Mapping[str, Any], arms: Collection[str], runs: Path) -> list[Training | FineTuning]:
    """Return the runs on which rates and form are chosen: all arms with the first rate, then with the next one."""
    stage, of_arms = plan["stages"]["development"], {arm: rates_of(plan, arm) for arm in plan["arms"] if arm in arms}
    every = sorted({rate for rates in of_arms.values() for rate in rates})
    pairs = [(arm, rate) for rate in every for arm, rates in of_arms.items() if rate in rates]
    return [_trained(plan, "development", development_name(arm, rate), {"like": arm}, rate, seed, runs)
            for seed in stage["seeds"] for arm, rate in pairs]  # fmt: skip


def rates_of(plan: Mapping[str, Any], arm: str) -> Sequence[float]:
    """Return the rates that an arm is tried with in development: its own, or those of the plan."""
    return plan["arms"][arm].get("rates", plan["rates"])


def development_name(arm: str, rate: float) -> str:
    return f"dev-{arm}" if rate == FROZEN else f"dev-{arm}-{rate:.0e}".replace("e-0", "e-")


def score(rows: Sequence[Mapping[str, float]], scored: int, metric: str = SCORE) -> float:
    """Return the mean of a metric's last `scored` values in a run."""
    return float(np.mean([row[metric] for row in rows if metric in row][-scored:]))


def chosen(plan: Mapping[str, Any], results: Path, arms: Collection[str]) -> dict[str, tuple[str, float]]:
    """Return by arm, `best` among them, the arm whose settings it has and its rate, by the scores in development.

    Of equal scores the smaller rate wins, and the form that comes first; of zeros the largest rate, which learns most
    from the few successes that there may be. Raises SystemExit while runs are missing.
    """
    scored = plan["stages"]["development"]["scored"]
    found: dict[str, tuple[float, float]] = {}
    missing = []
    for job in sorted(development(plan, arms, Path()), key=lambda job: job.rate):
        file, arm = file_of(job, results), job.like
        if not file.is_file():
            missing.append(job.name)
        else:
            reached = reached_in(job, file, scored)
            if reached > (before := found.get(arm, (0.0, 0.0))[0]) or before == 0.0:
                found[arm] = reached, job.rate
    if missing:
        raise SystemExit(f"rates and form are not chosen yet: development lacks {', '.join(missing[:3])} ...")
    picked = {arm: (arm, rate) for arm, (_, rate) in found.items()}
    best = max(plan["forms"], key=lambda form: found[form][0], default=None)
    return picked | ({BEST: picked[best]} if best else {})


def reached_in(job: Job, file: Path, scored: int) -> float:
    """Return the score of a run of development, from what was kept of it."""
    return score(read_rows(file), scored) if isinstance(job, Training) else share_in(file)


def share_in(file: Path) -> float:
    """Return the share of an evaluation's episodes that succeeded."""
    counts = [count for houses in json.loads(file.read_text())["parts"].values() for count in houses.values()]
    return sum(hits for hits, _ in counts) / sum(episodes for _, episodes in counts)


def provisional(plan: Mapping[str, Any], results: Path, arms: Collection[str]) -> dict[str, tuple[str, float]]:
    """Return what is chosen, or, while runs are missing, any choice with which all jobs can be listed."""
    try:
        return chosen(plan, results, arms)
    except SystemExit:
        found = {arm: (arm, rates_of(plan, arm)[0]) for arm in arms}
        return found | ({BEST: found[plan["forms"][-1]]} if plan["forms"] else {})


def later(plan: Mapping[str, Any], choice: Mapping[str, tuple[str, float]], stage: str, runs: Path) -> list[Job]:
    """Return the trainings of a stage, seed by seed, each with what is evaluated of it.

    A model is evaluated as soon as it is trained, while its weights are there: they are not kept. The start is
    evaluated where its stage stands.
    """

    def jobs(name: str) -> list[Job]:
        return [job for seed in plan["stages"][name]["seeds"] for job in _jobs(plan, name, seed, choice, runs)]

    of_models: dict[str, list[Job]] = {}
    for job in (job for name, values in plan["stages"].items() if "of" in values for job in jobs(name)):
        if isinstance(job, Evaluation):
            of_models.setdefault(job.model, []).append(job)
    made = [job for job in jobs(stage) if not isinstance(job, Evaluation) or job.model == WARM]
    return [each for job in made for each in (job, *of_models.get(job.name, ()))]


def _jobs(
    plan: Mapping[str, Any], name: str, seed: int, choice: Mapping[str, tuple[str, float]], runs: Path
) -> Iterator[Job]:
    stage, best = plan["stages"][name], choice.get(BEST, ("", 0.0))[0]
    for arm, values in stage.get("arms", {}).items():
        like, rate = choice.get(values["like"], (None, FROZEN))
        if like and not repeats(plan, name, arm, best):
            yield _trained(plan, name, arm, values | {"like": like}, rate, seed, runs)
    models = [f"{arm}-{seed}" for arm in stage.get("of", ()) if not repeats(plan, "described", arm, best)]
    if name == "deleted":
        yield from (Evaluation(name, "deleted", model, seed) for model in models)
    if name == "adaptation":
        for model in [WARM] * (seed == stage["seeds"][0]) + models:
            crossed = (OWN,) if model == WARM else (OWN, *CROSSED)
            kinds = (*ADAPTATIONS, *(crossed if stage.get("crossed") else ()))
            yield from (Evaluation(name, kind, model, seed) for kind in kinds)


def repeats(plan: Mapping[str, Any], stage: str, arm: str, best: str) -> bool:
    """Return whether a described arm is the best form itself, whose runs the claim has."""
    return stage == "described" and arm == best and arm in plan["forms"]


def _trained(
    plan: Mapping[str, Any], stage: str, arm: str, values: Mapping[str, Any], rate: float, seed: int, runs: Path
) -> Training | FineTuning:
    if of := plan["arms"][values["like"]].get("of"):
        name = development_name(of, FROZEN) if stage == "development" else of
        training = _training(plan, stage, name, {"like": of}, FROZEN, seed, runs)
        return FineTuning(stage, arm, values["like"], rate, seed, training, plan["stages"][stage]["samples"])
    return _training(plan, stage, arm, values, rate, seed, runs)


def _training(
    plan: Mapping[str, Any], stage: str, arm: str, values: Mapping[str, Any], rate: float, seed: int, runs: Path
) -> Training:
    values_of_stage = plan["stages"][stage]
    like = plan["arms"][values["like"]]
    layer: dict[str, Any] = {"tasks": {"args": {"block": seed}}}
    for over in (plan["settings"], like["settings"], values_of_stage["settings"], values.get("settings", {})):
        layer = lay_over(layer, over)
    name = f"{arm}-{seed}"
    run = {"name": name, "directory": str(runs), "resume": "auto", "validate_with_memory": values.get("notes", False)}
    layer = lay_over(layer, {"run": run, "algorithm": {"learning_rate": rate, "seed": seed}})
    world = ROOT / f"agents/houses/{values_of_stage.get('world', 'coin')}.yaml"
    title = values.get("title", f"{like['title']}, {rate:.0e}")
    phases = [
        Trial(arm, title, seed, load_settings("cpu", file=world, layer=lay_over(layer, {"run": phase})))
        for phase in values.get("phases", values_of_stage["phases"])
    ]
    return Training(stage, arm, values["like"], rate, tuple(phases))


def read_rows(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
