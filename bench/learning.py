"""Does EMPO² learn where exploration is the bottleneck? Train the arms of bench/learning.yaml, and compare them.

    .venv/bin/python bench/learning.py run       # train what is not trained yet, one run at a time; hours on two cores
    .venv/bin/python bench/learning.py report    # the pictures and the tables of docs/learning.md from the results

It is the sweep `empo2 sweep bench/learning.yaml --profile cpu --config agents/houses/coin.yaml`, with results
that are kept in bench/learning/, one or two files for each run; the runs themselves, with weights and memories, are in
runs/learning/ and can be removed. A run that was interrupted goes on from its last checkpoint.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

from learning_notes import outcomes_by_notes, training_houses
from learning_report import KEPT, NOTES, write_report

from empo2.recipe.errors import ProcessError
from empo2.recipe.launcher.plan import Trial, read_plan
from empo2.recipe.launcher.sweep import clock_of, has_ended, reaches_end, train
from empo2.recipe.run_folder import MEMORY_FILE, read_lines, read_metrics

ROOT = Path(__file__).parents[1]
PLAN = Path(__file__).with_suffix(".yaml")
RESULTS = Path(__file__).with_suffix("")
WORLD = ROOT / "agents/houses/coin.yaml"


def trials_in(runs: Path) -> list[Trial]:
    """Return the trials of the plan, whose runs are in a folder."""
    return read_plan(PLAN, runs, profile="cpu", config=WORLD)[1]


def result_of(trial: Trial) -> Path:
    """Return the file that keeps a trial's metrics."""
    return RESULTS / f"{trial.name}.jsonl"


def keep(trial: Trial, runs: Path) -> None:
    """Write what the report reads: metrics, a line for each step, and what notes episodes were shown."""
    seconds = {line["step"]: line["cpu_seconds"] for line in read_lines(clock_of(trial, runs))}
    RESULTS.mkdir(exist_ok=True)
    if trial.settings.algorithm.name != "grpo":
        houses = training_houses(trial.settings.tasks.args["level"], trial.settings.tasks.args["train_houses"])
        outcomes = outcomes_by_notes(runs / trial.name / MEMORY_FILE, houses)
        (RESULTS / f"{trial.name}{NOTES}").write_text(json.dumps(outcomes) + "\n")
    with result_of(trial).open("w") as out:  # last: with it a run counts as kept
        for row in read_metrics(runs / trial.name):
            kept = {key: round(value, 6) for key, value in row.items() if key.startswith(KEPT)}
            out.write(json.dumps(kept | {"cpu_seconds": seconds[row["step"]]}) + "\n")


def say(trial: Trial, text: str) -> None:
    print(f"{time.strftime('%H:%M')}  {trial.name}  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "report"))
    parser.add_argument("--only", nargs="+", metavar="ARM-SEED", help="only these runs")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/learning", help="folder of the runs")
    arguments = parser.parse_args()
    if arguments.verb == "report":
        write_report(PLAN, RESULTS, ROOT / "docs")
        return
    trials = trials_in(arguments.runs)
    names = [trial.name for trial in trials]
    if unknown := set(arguments.only or ()) - set(names):
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: not in {PLAN.name}, which has {', '.join(names)}")
    wanted = [trial for trial in trials if arguments.only is None or trial.name in arguments.only]
    for trial in wanted:
        if not reaches_end(result_of(trial), trial):  # the plan may have got more steps since
            if not has_ended(trial, arguments.runs):
                try:
                    train(trial, arguments.runs, partial(say, trial))
                except ProcessError as error:
                    raise SystemExit(str(error)) from None
            keep(trial, arguments.runs)


if __name__ == "__main__":
    main()
