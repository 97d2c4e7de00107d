"""What do asynchronous rollouts gain where a few episodes take much longer than the others?

The real stack trains the small model on CoinCollector twice, with the same settings: with synchronous rollouts, and
with agent-lightning's asynchronous ones (docs/async.md), which play twice as many groups at once as a step trains. The
world takes seconds for each turn, as a simulator or a browser does: 0.4 to 10, drawn once for each episode from a
Pareto distribution with shape 1.2. So half of the episodes take less than 0.7 s a turn, and one in sixteen more than
4 s.

  step          seconds of a step, mean; the first one, in which asynchronous rollouts are few, is left out
  rollouts      of it, until enough rollouts had ended
  steps/h       training steps an hour
  rollouts/h    rollouts trained an hour
  return        mean of the trained rollouts, in the first and the second half of the steps
  staleness     updates between the first weights that sampled a trained rollout and its own update: mean, most
  success       without notes, on the houses that are trained on, at the end
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from shared import Goal, empty_table, report, say
from step import ROOT, Run, train

GROUPS, SIZE = 4, 4
GOAL = 1.5
ARMS = {
    "synchronous": [],
    "asynchronous": [
        "verl.agentlightning.async_rollout.enabled=true",
        f"verl.agentlightning.async_rollout.async_train_batch_size={2 * GROUPS}",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: two steps")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="training steps of a run (default: 8)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the runs")
    options = parser.parse_args()
    steps = 2 if options.quick else options.steps
    settings = [
        "agent.class=slow_agent:SlowAgent",
        f"agent.concurrency={2 * GROUPS * SIZE}",
        f"run.steps={steps}",
        "run.validate_first=false",
        "run.validate_training_tasks=true",
        "run.validate_samples=4",
        "tasks.args.level=easy",
        f"tasks.args.train_houses={GROUPS}",
        "tasks.args.unseen_houses=1",
        "algorithm.mode_per=group",
        f"algorithm.tasks_per_step={GROUPS}",
        f"algorithm.rollouts_per_task={SIZE}",
        "algorithm.updates_per_step=2",
        "algorithm.learning_rate=2e-5",
        *options.settings,
    ]
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    columns = ("step", "rollouts", "steps/h", "rollouts/h", "return", "staleness", "success")
    table = empty_table(f"{steps} steps of {GROUPS * SIZE} trained rollouts", ["rollouts"], columns)
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, more in ARMS.items():
            say(f"{name} rollouts")
            runs[name] = train(Path(folder), name, ROOT / "agents/houses/coin.yaml", [*settings, *more])
            table.add_row(name, *cells(runs[name]))
    synchronous, asynchronous = (mean(runs[name], "timing_s/step") for name in ARMS)
    gain = synchronous / asynchronous
    text = f"steps an hour at least {GOAL} times those with synchronous rollouts"
    report(table, [Goal(text, None if options.quick else f"{gain:.2f}", bool(gain >= GOAL))])


def cells(run: Run) -> list[str]:
    returns = values(run, "training/return")
    half = len(returns) // 2
    seconds = mean(run, "timing_s/step")
    trained = mean(run, "training/n_rollouts")
    return [
        f"{seconds:.1f}",
        f"{mean(run, 'timing_s/rollouts'):.1f}",
        f"{3600 / seconds:.0f}",
        f"{3600 / seconds * trained:.0f}",
        f"{np.mean(returns[:half]):.1f}, {np.mean(returns[half:]):.1f}",
        f"{mean(run, 'empo2/staleness_mean'):.2f}, {max(values(run, 'empo2/staleness_max'), default=0):.0f}",
        f"{values(run, 'val/train/success_rate')[-1]:.0%}",
    ]


def values(run: Run, name: str) -> Sequence[float]:
    return [step.metrics[name] for step in run.steps if name in step.metrics]


def mean(run: Run, name: str) -> float:
    """Return a metric's mean over the steps after the first one; 0 if there is no such metric."""
    return float(np.mean(values(run, name)[1:] or [0.0]))


if __name__ == "__main__":
    main()
