"""Does EMPO² learn where exploration is the bottleneck? Make the runs of experiments/learning.yaml, and compare them.

    .venv/bin/python experiments/learning.py start             # the untrained start's chances of a coin; 3 minutes
    .venv/bin/python experiments/learning.py list              # what is to be made, in its order, and what is kept
    .venv/bin/python experiments/learning.py run --until 07:30 # makes it, one thing at a time; a day on two fast cores
    .venv/bin/python experiments/learning.py report            # the tables and pictures of docs/learning.md

With `--plan deep` it is experiments/deep.yaml, of deep houses, whose results lie in experiments/deep/.

What explains a run is kept in experiments/learning/: NAME.jsonl has the metrics, a line for each step; NAME.json the
houses' successes at the last validations and what notes said; NAME.probe.jsonl what experiments/probe.py found of its
checkpoints. The runs themselves, with logs and exported models, are in runs/learning/ and can be removed. What was
interrupted goes on: a training from its last checkpoint, an evaluation episode by episode.
"""

import argparse
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from deep_report import write_deep_report
from fine_tune import fine_tune, successes
from learning_notes import outcomes_by_notes, training_houses, true_notes
from learning_plan import (
    FROZEN,
    PLANS,
    RESULTS,
    ROOT,
    WARM,
    Evaluation,
    FineTuning,
    Job,
    Training,
    all_jobs,
    chosen,
    file_of,
    provisional,
    read_plan,
)
from learning_report import KEPT, START, write_report
from learning_rollouts import played, succeeded

from empo2.agents.houses.games import COIN_COLLECTOR
from empo2.agents.houses.tasks import CoinCollectorEpisode, coin_collector
from empo2.memory import copy_memory
from empo2.memory.cpu import fast_dtype
from empo2.recipe.errors import Empo2Error, Preempted
from empo2.recipe.evaluation.adaptation import memory_of
from empo2.recipe.evaluation.episode_results import read_results
from empo2.recipe.files.models import NOTES, resolve_model
from empo2.recipe.files.plan import Trial
from empo2.recipe.files.tasks import load_tasks
from empo2.recipe.launcher.sweep import has_ended, train
from empo2.recipe.protocol import scope_of
from empo2.recipe.run_folder import (
    CHECKPOINTS,
    MEMORY_FILE,
    METRICS_FILE,
    read_lines,
    read_metrics,
)

PROBE = Path(__file__).with_name("probe.py")
EMPO2 = (sys.executable, "-m", "empo2.recipe.cli")
WORLD = ("--profile", "cpu", "--config", ROOT / "agents/houses/coin.yaml")
STOP_SECONDS = 30  # until all processes have ended
DISGUISE = 1  # of the houses of adaptation; their level is not trained on

type Counts = dict[str, list[int]]
"""By seed of a house: [episodes that succeeded, episodes]."""


class FailedJobError(Empo2Error):
    """A job that cannot be made; the others can."""


class OutOfTimeError(Exception):
    """The time of `--until` has come, or comes before the next checkpoint."""


class Clock:
    """Ends the work before a time: between two checkpoints that the next one would come too late, else at that time."""

    def __init__(self, until: datetime | None) -> None:
        self._until, self._last = until, datetime.now()
        if until:
            signal.signal(signal.SIGALRM, _out_of_time)
            left = (until - datetime.now()).total_seconds() - STOP_SECONDS
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))

    def begins(self) -> None:
        self._last = datetime.now()

    def checkpoint(self) -> None:
        """Raise OutOfTimeError if as long as since the last checkpoint, or the beginning, is not left."""
        now = datetime.now()
        if self._until and now + (now - self._last) > self._until:
            raise OutOfTimeError
        self._last = now


class CpuSeconds:
    """Writes the CPU seconds from the beginning of a training until each step was done, interruptions left out.

    Those of all processes that it started are counted, ended ones too, but for what these used since the last look.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = max((line["cpu_seconds"] for line in read_lines(file)), default=0.0)
        self._seconds: dict[tuple[int, float], float] = {}

    def look(self, process: int, step: int | None) -> None:
        """Count, or write a line for a step that is done."""
        if step is not None:
            line = {"step": step, "cpu_seconds": round(self._before + sum(self._seconds.values()))}
            with self._file.open("a") as times:
                times.write(json.dumps(line) + "\n")
            return
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process)
            for each in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    used = each.cpu_times()
                    self._seconds[each.pid, each.create_time()] = used.user + used.system


def cpu_file(phase: Trial, runs: Path) -> Path:
    return runs / f"{phase.name}.cpu.jsonl"


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError


def time_of(text: str) -> datetime:
    """Return the next time that a clock shows HH:MM."""
    now = datetime.now()
    found = datetime.combine(now.date(), datetime.strptime(text, "%H:%M").time())
    return found if found > now else found + timedelta(days=1)


@dataclass(frozen=True)
class Experiment:
    """A plan, the folder in which what explains a run is kept, and that in which runs are made."""

    plan: dict[str, Any]
    results: Path
    runs: Path

    @property
    def start(self) -> str:
        """The name of the model that all trainings begin with."""
        return self.plan["settings"].get("model", {}).get("path", NOTES)

    def jobs(self) -> Iterator[Job]:
        """Yield all that is to be made; what follows development once that has been made."""
        return all_jobs(self.plan, self.runs, partial(chosen, self.plan, self.results))

    def model_of(self, name: str) -> Path:
        return self.runs / "models" / name


# Trainings


def make_training(job: Training, of: Experiment, clock: Clock) -> None:
    """Train through all phases, probe the checkpoints, keep what explains the run, and export its last weights."""
    runs = of.runs
    for phase in job.phases:
        if not has_ended(phase, runs):
            clock.begins()
            counter = CpuSeconds(cpu_file(phase, runs))
            train(phase, runs, lambda text, phase=phase: _show(phase, runs, clock, text), look=counter.look)
    run, model = runs / job.name, of.model_of(job.name)
    if job.rate != FROZEN:
        if job.stage in of.plan.get("probed", ()):
            probed(run, of.start, of.results / f"{job.name}.probe.jsonl")
        shutil.rmtree(model, ignore_errors=True)  # of an export that was interrupted
        _command("export", run, "--output", model)
    keep_training(job, of)
    shutil.rmtree(run / CHECKPOINTS)


def probed(run: Path, start: str, output: Path) -> None:
    """Write what the probe finds of a run's start and of its checkpoints."""
    subprocess.run([sys.executable, PROBE, run, "--start", start, "--output", output], check=True)


def _show(phase: Trial, runs: Path, clock: Clock, text: str) -> None:
    say(phase.name, text)
    step = read_lines(runs / phase.name / METRICS_FILE)[-1]["step"]
    if step and step % phase.settings.run.save_every == 0:
        clock.checkpoint()


def keep_training(job: Training, of: Experiment) -> None:
    """Write what the report reads of a run."""
    run, settings = of.runs / job.name, job.phases[-1].settings
    facts = {"stage": job.stage, "arm": job.arm, "like": job.like, "rate": job.rate, "seed": job.seed}
    facts["commit"] = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    facts["validations"] = validations(run)
    facts["found"] = first_successes(run)
    if job.stage != "mapreader" and settings.algorithm.name == "empo2" and settings.memory.scope != "all-tasks":
        houses = training_houses(load_tasks(settings).train)
        facts["notes"] = outcomes_by_notes(run / MEMORY_FILE, houses)
        if settings.reflection.form != "transcript":  # what it was, no statement
            facts["notes_true"] = true_notes(run / MEMORY_FILE, houses)
    _write(of.results / f"{job.name}.json", json.dumps(facts))
    seconds = {line["step"]: line["cpu_seconds"] for line in read_lines(cpu_file(job.phases[0], of.runs))}
    lines = []
    for row in read_metrics(run):
        values = {key: round(value, 6) for key, value in row.items() if key.startswith(KEPT)}
        used = max((found for step, found in seconds.items() if step <= row["step"]), default=0)
        lines.append(json.dumps(values | {"cpu_seconds": used}) + "\n")  # a step that ended a run may have no time
    _write(file_of(job, of.results), "".join(lines))  # last: with it a run counts as kept


def validations(run: Path) -> dict[str, dict[str, Counts]]:
    """Return by step, and by panel with or without notes, how often each house was solved in the run's last steps.

    An episode that failed counts as not solved. What was played before an interruption stands in a folder of its own.
    """
    found: dict[str, dict[str, Counts]] = {}
    for step, rollouts in played(run, "validation", ["mode", "return", "dropped", "task"]).items():
        for rollout, *_ in rollouts:
            task = json.loads(rollout["task"])
            part = f"{task.get('panel', 'unseen')}, {'no ' * (rollout['mode'] == 'no memory')}notes"
            counts = found.setdefault(str(step), {}).setdefault(part, {})
            count(counts, task["seed"], rollout["return"] if rollout["dropped"] is None else None)
    return found


def first_successes(run: Path) -> dict[str, int]:
    """Return by house that was solved in training which of its episodes was the first to do so, from 1 on."""
    episodes: Counter[str] = Counter()
    found: dict[str, int] = {}
    for _, rollouts in sorted(played(run, "training", ["return", "dropped", "task"]).items()):
        for rollout, *_ in rollouts:
            house = str(json.loads(rollout["task"])["seed"])
            episodes[house] += 1
            if succeeded(rollout, 100):
                found.setdefault(house, episodes[house])
    return found


def count(counts: Counts, seed: int, return_: float | None) -> None:
    hits = counts.setdefault(str(seed), [0, 0])
    hits[0] += return_ is not None and return_ >= 100
    hits[1] += 1


# Evaluations


def make_fine_tuning(job: FineTuning, of: Experiment) -> None:
    """Fine-tune the start on a training's successes without their notes, and play the houses of that training."""
    model, settings, run = of.model_of(job.name), job.of.phases[-1].settings, of.runs / job.of.name
    if not run.is_dir():
        raise _gone(f"the rollouts of {job.of.name}", file_of(job.of, of.results))
    chats = successes(run, settings.algorithm.success_return)
    say(job.name, f"{len(chats)} successes")
    before = time.process_time()
    fine_tune(Path(resolve_model(of.start)), chats, model, rate=job.rate, seed=job.seed, **of.plan["fine_tuning"])
    seconds = round(time.process_time() - before)
    rows = coin_collector(**settings.tasks.args)[0]
    play(job, rows, of, "eval", model, *WORLD, "--memory", "off", "--samples", job.samples, cpu_seconds=seconds)


def make_evaluation(job: Evaluation, of: Experiment) -> None:
    """Play the episodes of an evaluation."""
    stage, rows = of.plan["stages"][job.stage], rows_of(job, of.plan)
    model: list[Any] = [of.model_of(job.model)]
    if job.model == WARM or job.kind == "by-start":
        shown = of.plan["settings"].get("memory", {})
        model = [of.start, *WORLD, *(f"memory.{key}={value}" for key, value in shown.items())]
    elif not model[0].is_dir():
        raise _gone(f"the weights of {job.model}", of.results / f"{job.model}.jsonl")
    if job.kind == "deleted":
        play(job, rows, of, "eval", *model, "--memory", "off", "--samples", stage["samples"])
    else:
        trials = stage["trials"] - 1 if job.kind in ("write", "off") else 1  # after the first, which has no notes
        options = ["--trials", trials, "--rollouts", stage["rollouts"], "--seeds", 1, "reflection.form=sentence"]
        options += memory_options(job, of, [scope_of(row, ["level", "seed"]) for row in rows])
        play(job, rows, of, "adapt", *model, *options)


def _gone(what: str, kept: Path) -> FailedJobError:
    return FailedJobError(f"{what} are not here; remove {kept.name}, and they are made again")


def play(
    job: FineTuning | Evaluation, rows: Sequence[dict[str, Any]], of: Experiment, verb: str, *options: Any, **facts: Any
) -> None:
    """Play the tasks `rows` with a command; keep `facts`, and how often each house was solved in each of its parts."""
    folder, panel = of.runs / job.name, of.runs / f"{job.name}.panel.json"
    of.runs.mkdir(parents=True, exist_ok=True)
    write_panel(panel, rows)
    _command(verb, *options, "--panel", panel, "--output", folder)
    parts: dict[str, Counts] = {}
    for result in read_results(folder):
        counts = parts.setdefault(result.part, {})
        count(counts, rows[result.index]["seed"], result.return_)
    _write(file_of(job, of.results), json.dumps({"stage": job.stage, "parts": parts} | facts))


def write_panel(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    _write(file, json.dumps({"description": file.stem, "group": [], "config": {}, "common": {}, "rows": rows}))


def rows_of(job: Evaluation, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the houses of an evaluation: those that the model was trained on, or new ones of another level."""
    if job.kind == "deleted":
        return coin_collector(**plan["stages"]["claim"]["settings"]["tasks"]["args"], block=job.seed)[0]
    level = plan["stages"][job.stage]["level"]
    common = {"level": level, "disguise": DISGUISE, "actions": "free-text", "choices": 6}
    common["max_steps"] = COIN_COLLECTOR.levels[level].max_steps
    return [asdict(CoinCollectorEpisode(seed=seed, **common)) for seed in COIN_COLLECTOR.panel(level)["unseen"][:16]]


def memory_options(job: Evaluation, of: Experiment, scopes: Sequence[str]) -> list[Any]:
    """Return the options for the memory of an adaptation.

    own, of-start, by-start: all notes that the model has written, read once more; the start's, read by the model; the
    model's, read by the start. other: all that the model has written, each house's under the next one.
    """
    if job.kind == "off":
        return ["--memory", "off"]
    if job.kind == "write":
        return ["--memory", "write", "--empty"]
    writer = WARM if job.kind == "of-start" else job.model
    _, written = memory_of(of.runs / f"{writer}.write", 0)
    if written is None:
        raise _gone(f"the notes of {writer}.write", of.results / f"{writer}.write.json")
    if job.kind != "other":
        return ["--memory", "read", "--memory-from", written]
    target = of.runs / f"{job.name}.sqlite"
    refile(written, target, scopes)
    return ["--memory", "read", "--memory-from", target]


def refile(memory: Path, target: Path, scopes: Sequence[str]) -> None:
    """Write a copy of a memory with the tips of each scope under the next one, those of the last under the first."""
    target.unlink(missing_ok=True)  # of an evaluation that was interrupted
    copy_memory(memory, target)
    following = dict(zip(scopes, [*scopes[1:], scopes[0]], strict=True))
    with closing(sqlite3.connect(target)) as db, db:
        tips = db.execute("SELECT id, scope FROM tips").fetchall()
        db.executemany("UPDATE tips SET scope = ? WHERE id = ?", [(following[scope], tip) for tip, scope in tips])


# The start


def chances_of_start(of: Experiment) -> dict[str, dict[str, float]]:
    """Return by seed of the claim, and by house, the probability of the way without a note at temperature 1.

    Only the shortest way is counted: where an episode has a move to spare, the start finds somewhat more.
    """
    from probe import log_probs, probe, walk
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, stage = resolve_model(of.start), of.plan["stages"]["claim"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=fast_dtype()).eval()
    found: dict[str, dict[str, float]] = {}
    for seed in stage["seeds"]:
        houses = training_houses(coin_collector(**stage["settings"]["tasks"]["args"], block=seed)[0])
        walks = {name: walk(house, None, tokenizer) for name, house in houses.items()}
        found[str(seed)] = {
            str(name): probe(model, [each], [log_probs(model, each)])["way"] for name, each in walks.items()
        }
    return found


# The command


def _command(verb: str, *words: Any) -> None:
    """Run `empo2`; it is ended when this process is interrupted."""
    command = [*EMPO2, verb, *map(str, words)]
    if subprocess.run(command).returncode:
        raise FailedJobError(f"empo2 {' '.join(command[3:])}")


def _write(file: Path, text: str) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(file)


def say(name: str, text: str) -> None:
    print(f"{time.strftime('%H:%M')}  {name}  {text}", flush=True)


def make(of: Experiment, wanted: Callable[[Job], bool], clock: Clock) -> None:
    """Make all jobs that are wanted and not kept, in their order; one that fails is told, and the others are made.

    Raises SystemExit at the end if one has failed.
    """
    of.results.mkdir(exist_ok=True)
    failed = []
    for job in of.jobs():
        if wanted(job) and not file_of(job, of.results).exists():
            say(job.name, "begins")
            try:
                if isinstance(job, Training):
                    make_training(job, of, clock)
                elif isinstance(job, FineTuning):
                    make_fine_tuning(job, of)
                else:
                    make_evaluation(job, of)
            except Preempted:
                raise
            except Empo2Error as error:
                say(job.name, f"failed: {error}")
                failed.append(job.name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("start", "list", "run", "report"))
    parser.add_argument("--plan", choices=PLANS, default=PLANS[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these, or those of these stages")
    parser.add_argument("--until", type=time_of, metavar="HH:MM", help="stop before this time, at a checkpoint")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="of the runs; runs/PLAN by default")
    arguments = parser.parse_args()
    name, only = arguments.plan, arguments.only
    of = Experiment(read_plan(name), RESULTS / name, arguments.runs or ROOT / "runs" / name)

    def wanted(job: Job) -> bool:
        return not only or bool({job.name, job.stage} & set(only))

    if arguments.verb == "report":
        (write_report if name == PLANS[0] else write_deep_report)(of.plan, of.results, ROOT / "docs")
    elif arguments.verb == "start":
        of.results.mkdir(exist_ok=True)
        _write(of.results / START, json.dumps(chances_of_start(of)))
    elif arguments.verb == "list":
        choose = partial(provisional, of.plan, of.results)
        for job in filter(wanted, all_jobs(of.plan, of.runs, choose)):
            print(f"{job.stage:16}{job.name:40}{'kept' if file_of(job, of.results).exists() else 'to be made'}")
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            make(of, wanted, Clock(arguments.until))
        except OutOfTimeError:
            print(f"stopped before {arguments.until:%H:%M}; the same command goes on")
        except (KeyboardInterrupt, Preempted):
            sys.exit("interrupted; the same command goes on")


if __name__ == "__main__":
    main()
