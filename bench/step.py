"""Measure a training step on the real stack: vLLM, verl, Ray, gateway and agents train a small model on the CPU.

GRPO and EMPO² train with the same settings, one after the other. The seconds are those that the runs write to their
metrics.jsonl; the CPU seconds of each step are read from /proc at its end.

  step          seconds of the whole step
  rollouts      until the last rollout has ended; of a rollout's own time, as means:
    queue         until its agent was started, which agent.concurrency limits
    start         until its first model call: the agent's start, and its world's
    model         its model calls, as the gateway saw them
    agent         the rest: its world and its own work
  drain         waiting for the reflections that were still running
  old log-probs, update (forward and backward passes, optimizer), weights (to vLLM)
  CPU           of the agents, with their worlds; of vLLM; of the trainer (actor and driver); of the gateway

A busy machine makes the seconds longer, but hardly the CPU seconds: compare both.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import Goal, empty_table, report, say

from empo2.recipe.launcher.progress import NewLines
from empo2.recipe.run_folder import METRICS_FILE, step_mode

ROOT = Path(__file__).parents[1]
STEP_SECONDS, START_SECONDS = 40, 60
_POLL_SECONDS = 0.5
_CLOCK = os.sysconf("SC_CLK_TCK")
_SECONDS = {
    "step": "step",
    "rollouts": "rollouts",
    "queue": "rollout_queue",
    "start": "rollout_start",
    "model": "rollout_model",
    "agent": "rollout_agent",
    "drain": "drain",
    "old log-probs": "old_log_prob",
    "update": "update_actor",
    "weights": "update_weights",
}
_KINDS = ("agents", "vLLM", "trainer", "gateway", "Ray")


@dataclass(frozen=True)
class Step:
    """One training step: its metrics, and the CPU time by kind of process, in clock ticks."""

    metrics: dict[str, Any]
    cpu: Counter[str]


@dataclass(frozen=True)
class Run:
    """The steps of a run; the seconds and the CPU time, in clock ticks, until the first rollout."""

    steps: list[Step]
    start: float
    start_cpu: Counter[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one step of four episodes, EMPO² alone")
    parser.add_argument(
        "--config",
        type=Path,
        default=ROOT / "agents/textworld_express/train.yaml",
        metavar="FILE",
        help="settings of the world (default: TextWorld-Express's)",
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", metavar="NAME", help="model.path of the run")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="training steps of a run (default: 3)")
    parser.add_argument("--max-steps", type=int, default=6, metavar="N", help="actions of an episode (default: 6)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the runs")
    options = parser.parse_args()
    names, groups, size = ("grpo", "empo2"), 2, 8
    if options.quick:
        names, size, options.steps = ("empo2",), 2, 1
    settings = [
        f"model.path={options.model}",
        f"run.steps={options.steps}",
        f"tasks.args.max_steps={options.max_steps}",
    ]
    settings += [f"algorithm.tasks_per_step={groups}", f"algorithm.rollouts_per_task={size}"]
    settings += [f"agent.concurrency={groups * size}", "run.validate_first=false", *options.settings]
    columns = [*_SECONDS, *(f"CPU {kind}" for kind in _KINDS), "CPU"]
    table = empty_table(f"{groups * size} episodes of at most {options.max_steps} actions", ["", "mode"], columns)
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            say(f"{name} trains")
            runs[name] = train(Path(folder), name, options.config, [f"algorithm.name={name}", *settings])
            for row in rows(name, runs[name]):
                table.add_row(*row)
    report(table, goals(runs, measured=not options.quick))


def rows(name: str, run: Run) -> Iterator[list[str]]:
    """Yield a line for the start, and one for each step."""

    def cpu(ticks: Counter[str]) -> list[str]:
        return [f"{each / _CLOCK:.1f}" for each in (*(ticks[kind] for kind in _KINDS), ticks.total())]

    yield [f"{name}: start", "", f"{run.start:.1f}", *[""] * (len(_SECONDS) - 1), *cpu(run.start_cpu)]
    for step in run.steps:
        seconds = (step.metrics.get(f"timing_s/{key}") for key in _SECONDS.values())
        mode = (step_mode(step.metrics) or "") if name == "empo2" else ""
        shown = [f"{value:.1f}" if value is not None else "" for value in seconds]
        yield [f"{name}: step {step.metrics['step']}", mode, *shown, *cpu(step.cpu)]


def goals(runs: dict[str, Run], *, measured: bool) -> list[Goal]:
    """Return the goals; means leave out the first step, in which the gateway loads its embedder."""
    empo2 = runs["empo2"]
    later = [step.metrics["timing_s/step"] for step in empo2.steps[1:]]
    step = sum(later) / len(later) if later else None
    said = [f"{step:.1f} s" if measured and step else None, f"{empo2.start:.1f} s" if measured else None]
    found = [
        Goal(f"a step of EMPO² in at most {STEP_SECONDS} s", said[0], bool(step) and step <= STEP_SECONDS),
        Goal(f"first rollout at most {START_SECONDS} s after the start", said[1], empo2.start <= START_SECONDS),
    ]
    if measured and step and "grpo" in runs and len(runs["grpo"].steps) > 1:
        plain = [each.metrics["timing_s/step"] for each in runs["grpo"].steps[1:]]
        say(f"a step of EMPO² takes {step / (sum(plain) / len(plain)):.2f} times as long as one of GRPO")
    return found


def train(folder: Path, name: str, config: Path, settings: list[str]) -> Run:
    """Run `empo2 train` and follow it.

    Raises:
        RuntimeError: the training failed; the message holds the end of its output.
    """
    command = [sys.executable, "-m", "empo2.recipe.cli", "train", "--profile", "cpu", "--config", str(config)]
    command += [f"run.directory={folder}", f"run.name={name}", *settings]
    log = folder / f"{name}.log"
    steps: list[Step] = []
    start, start_cpu, begun = 0.0, Counter[str](), Counter[str]()
    new = NewLines(folder / name / METRICS_FILE)
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            now = cpu_time(process.pid)
            if not start and (found := re.search(r"first rollout (\d+) s", log.read_text())):
                start, start_cpu, begun = float(found[1]), now, now
            for metrics in new.rows():
                if "timing_s/step" in metrics:
                    steps.append(Step(metrics, now - begun))
                    begun = now
    if process.returncode:
        raise RuntimeError("\n".join(log.read_text().splitlines()[-20:]))
    return Run(steps, start, start_cpu)


def cpu_time(root: int) -> Counter[str]:
    """Return the CPU time in clock ticks of a process and all its descendants, ended ones too, by kind."""
    commands: dict[int, str] = {}
    own: dict[int, int] = {}
    reaped: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
            command = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        pid = int(entry)
        children[int(fields[1])].append(pid)
        commands[pid] = command
        own[pid], reaped[pid] = (sum(map(int, fields[at : at + 2])) for at in (11, 13))
    ticks: Counter[str] = Counter()

    def add(pid: int, kind: str) -> None:
        kind = kind_of(commands[pid]) or kind
        ticks[kind] += own[pid] + reaped[pid]
        for child in children[pid]:
            add(child, kind)

    if root in own:
        add(root, "trainer")
    return ticks


def kind_of(command: str) -> str | None:
    """Return the kind of process that a command line is; None for that of its parent."""
    for kind, pattern in (
        ("agents", r"empo2\.recipe\.cli controller"),
        ("vLLM", r"vLLM|VLLM|multiprocessing\.(forkserver|spawn)|multiprocessing\.resource_tracker"),
        ("gateway", r"empo2\.recipe\.cli gateway"),
        ("trainer", r"empo2\.recipe\.cli train|ray::WorkerDict"),
        ("Ray", r"ray/_private|ray/core|ray::"),
    ):
        if re.search(pattern, command):
            return kind
    return None


if __name__ == "__main__":
    main()
