"""Adapt with frozen weights: trials in which tips are written and used, and a panel that only reads them.

The same loop is EMPO²'s adaptation (arXiv 2602.23008, figure 8), MemRL's runtime learning (2601.03192, whose epochs are
the trials) and Reflexion (2303.11366): they differ in settings of the memory alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from empo2.recipe.evaluation.episode_results import MemoryUse, Planned, Result, Results
from empo2.recipe.evaluation.panels import Panel
from empo2.recipe.evaluation.player import Player, play_missing
from empo2.recipe.gateway_client import GatewayClient

TASKS, UNSEEN = "tasks", "unseen"

type Control = Literal["write", "read", "off"]
"""``write``: tips are written and used; ``read``: the memory is frozen; ``off``: no memory in any trial."""


@dataclass(frozen=True)
class Plan:
    """An adaptation."""

    tasks: Panel  # that tips are written on
    unseen: Panel | None  # only reads them
    trials: int  # after trial 0, which is without memory
    rollouts: int  # of each of the tasks in a trial, at the temperature of training
    samples: int  # of each unseen task in a trial, at the temperature of validation
    seeds: int  # independent repeats, each from the same memory
    memory: Control

    def part(self, seed: int, trial: int, panel: str) -> str:
        return f"seed {seed}, trial {trial}, {panel}"

    def planned(self, seed: int, trial: int, panel: str) -> list[Planned]:
        """Return the episodes of a trial on a panel. Both panels of a trial see the memory of the trials before it."""
        rows, times = (self.tasks.rows, self.rollouts) if panel == TASKS else (self.unseen_rows, self.samples)
        memory = self._memory(trial, panel)
        return [
            Planned(self.part(seed, trial, panel), index, sample, row, memory, explore=panel == TASKS)
            for sample in range(times)
            for index, row in enumerate(rows)
        ]

    def sizes(self) -> dict[str, int]:
        """Return the number of episodes of a trial on each panel."""
        return {TASKS: len(self.tasks.rows) * self.rollouts, UNSEEN: len(self.unseen_rows) * self.samples}

    def total(self) -> int:
        """Return the number of all episodes."""
        return self.seeds * (self.trials + 1) * sum(self.sizes().values())

    @property
    def unseen_rows(self) -> Sequence[dict]:
        return self.unseen.rows if self.unseen else ()

    def _memory(self, trial: int, panel: str) -> MemoryUse:
        if self.memory == "write" and panel == TASKS:
            return "read and write" if trial else "write"
        return "read" if trial and self.memory != "off" else "off"


def play_trials(
    plan: Plan,
    player: Player,
    results: Results,
    gateway: GatewayClient,
    start: Path,
    drain_seconds: float,
    show: Callable[[Result], None] = lambda result: None,
) -> None:
    """Play all trials of all seeds, from where an earlier command stopped.

    A trial's tips are in the memory that is kept after it. A trial that writes and was interrupted begins again from
    the memory before it, since its tips cannot be told apart by then; all else goes on episode by episode. What failed
    by the system is played once more before the trial is done.

    Args:
        gateway: that holds the memory.
        start: the memory of trial 0.
        drain_seconds: for the reflections of a trial's last episodes.
        show: called with each new result.
    """
    for seed in range(plan.seeds):
        done, memory = memory_of(results.folder, seed)
        if plan.memory != "off" and done < plan.trials:
            gateway.restore((memory or start).absolute())
        for trial in range(done + 1, plan.trials + 1):
            if plan.memory == "write":
                results.drop(plan.part(seed, trial, TASKS))
            for panel in (UNSEEN, UNSEEN, TASKS, TASKS):  # unseen tasks see no tip of this trial
                play_missing(player, results, plan.planned(seed, trial, panel), show)
            if plan.memory == "write":
                gateway.drain(drain_seconds)
                temporary, before = results.folder / "new-memory.sqlite", memory
                temporary.unlink(missing_ok=True)
                gateway.snapshot(temporary.absolute())
                # From now on the trial is done.
                memory = temporary.rename(results.folder / f"seed-{seed}-trial-{trial}.sqlite")
                if before is not None:
                    before.unlink()


def remaining(plan: Plan, results: Results) -> list[Planned]:
    """Return the episodes that are still to be played: all of a writing trial that is not complete."""
    left = []
    for seed in range(plan.seeds):
        done, _ = memory_of(results.folder, seed)
        for trial in range(done + 1, plan.trials + 1):
            left += results.missing(plan.planned(seed, trial, UNSEEN))
            tasks = plan.planned(seed, trial, TASKS)
            left += tasks if plan.memory == "write" else results.missing(tasks)
    return left


def memory_of(folder: Path, seed: int) -> tuple[int, Path | None]:
    """Return a seed's last complete trial and the memory after it; -1 and None before the first."""
    found = {int(file.stem.rpartition("-")[2]): file for file in folder.glob(f"seed-{seed}-trial-*.sqlite")}
    last = max(found, default=-1)
    return last, found.get(last)
