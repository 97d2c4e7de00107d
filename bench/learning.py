"""Does EMPO² learn where exploration is the bottleneck? Train the arms of bench/learning.yaml, and compare them.

    .venv/bin/python bench/learning.py run       # train what is not trained yet, one run at a time; hours on two cores
    .venv/bin/python bench/learning.py report    # docs/learning.png and the tables of docs/learning.md from the results

A run that was interrupted goes on from its last checkpoint. Results are kept in bench/learning/, a file for each run;
the runs themselves, with weights and memories, are in runs/learning/ and can be removed.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from learning_report import KEPT, write_report

from empo2.recipe.evaluation.report import Row, read_metrics
from empo2.recipe.launcher.progress import NewMetrics, step_summary
from empo2.recipe.run_folder import METRICS_FILE

ROOT = Path(__file__).parents[1]
PLAN = Path(__file__).with_suffix(".yaml")
RESULTS = Path(__file__).with_suffix("")
WORLD = ROOT / "agents/coin_collector/train.yaml"
_SAMPLE_SECONDS = 2


@dataclass(frozen=True)
class Trial:
    """One training: an arm of the plan with a seed. `settings` are those of the plan, laid over each other."""

    arm: str
    seed: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"


def read_plan() -> list[Trial]:
    """Return the trials in the order in which they are run: the first seed of every arm, then the second, ..."""
    plan = yaml.safe_load(PLAN.read_text())
    world = yaml.safe_load(WORLD.read_text())
    trials = [
        Trial(name, seed, laid_over(world, plan["settings"], arm["settings"], {"algorithm": {"seed": seed}}))
        for name, arm in plan["arms"].items()
        for seed in range(1, arm["seeds"] + 1)
    ]
    return sorted(trials, key=lambda trial: trial.seed)


def laid_over(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings merged; a later layer's values win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = laid_over(merged[key], value) if both else value
    return merged


class CpuSeconds(threading.Thread):
    """Count the CPU seconds of a process and of all that it started, ended processes included."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(process)
        self._seconds: dict[tuple[int, float], float] = {}

    def run(self) -> None:
        while self._root.is_running() and self._root.status() != psutil.STATUS_ZOMBIE:
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = times.user + times.system
            time.sleep(_SAMPLE_SECONDS)

    @property
    def total(self) -> float:
        return sum(self._seconds.copy().values())


def train(trial: Trial, runs: Path) -> None:
    """Train, or go on from the last checkpoint, and keep the metrics of each step with its CPU seconds.

    Raises:
        SystemExit: the training failed.
    """
    runs.mkdir(parents=True, exist_ok=True)
    config, folder, log_file = runs / f"{trial.name}.yaml", runs / trial.name, runs / f"{trial.name}.log"
    config.write_text(yaml.safe_dump(trial.settings))
    command = [sys.executable, "-m", "empo2.recipe.cli", "train", "--profile", "cpu", "--config", str(config)]
    command += [f"run.name={trial.name}", f"run.directory={runs}", "run.resume=auto"]
    clock = runs / f"{trial.name}.cpu.jsonl"  # CPU seconds from the beginning until each step was done
    with log_file.open("a") as log, clock.open("a+") as times:
        times.seek(0)
        before = max((json.loads(line)["cpu_seconds"] for line in times), default=0.0)
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        counter = CpuSeconds(process.pid)
        counter.start()
        news = NewMetrics(folder / METRICS_FILE)
        while True:
            ended = process.poll() is not None
            for metrics in news.read():
                print(f"{time.strftime('%H:%M')}  {trial.name}  {step_summary(metrics)}", flush=True)
                line = {"step": metrics["step"], "cpu_seconds": round(before + counter.total)}
                times.write(json.dumps(line) + "\n")
                times.flush()
            if ended:
                break
            time.sleep(1)
    if process.returncode:
        raise SystemExit(f"{trial.name}: ended with exit code {process.returncode}; see {log_file}")
    keep(read_metrics(folder), clock, RESULTS / f"{trial.name}.jsonl")


def keep(rows: Sequence[Row], clock: Path, result: Path) -> None:
    """Write the metrics that the report reads, a line for each step."""
    seconds = {line["step"]: line["cpu_seconds"] for line in map(json.loads, clock.read_text().splitlines())}
    RESULTS.mkdir(exist_ok=True)
    with result.open("w") as out:
        for row in rows:
            kept = {key: round(value, 6) for key, value in row.items() if key.startswith(KEPT)}
            out.write(json.dumps(kept | {"cpu_seconds": seconds[row["step"]]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "report"))
    parser.add_argument("--only", nargs="+", metavar="ARM-SEED", help="only these runs")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/learning", help="folder of the runs")
    arguments = parser.parse_args()
    trials = read_plan()
    names = [trial.name for trial in trials]
    if unknown := set(arguments.only or ()) - set(names):
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: not in {PLAN.name}, which has {', '.join(names)}")
    if arguments.verb == "run":
        for trial in trials:
            wanted = arguments.only is None or trial.name in arguments.only
            if wanted and not (RESULTS / f"{trial.name}.jsonl").exists():
                train(trial, arguments.runs)
    else:
        write_report(PLAN, RESULTS, ROOT / "docs")


if __name__ == "__main__":
    main()
