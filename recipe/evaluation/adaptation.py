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
from empo2.recipe.trainer.gateway_client import GatewayClient

TASKS, UNSEEN = "tasks", "unseen"

type Control = Literal["write", "read", "off"]
"""``write``: tips are written and used; ``read``: the memory is frozen; ``off``: no memory in any trial."""


@dataclass(frozen=True)
class Plan:
    """An adaptation.

    Attributes:
        tasks: the panel that tips are written on.
        unseen: a panel that only reads them; None for none.
        trials: after trial 0, which is without memory.
        rollouts: of each of the tasks in a trial, at the temperature of training.
        samples: of each unseen task in a trial, at the temperature of validation.
        seeds: independent repeats, each from the same memory.
    """

    tasks: Panel
    unseen: Panel | None
    trials: int
    rollouts: int
    samples: int
    seeds: int
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

    def everything(self) -> list[Planned]:
        """Return all episodes, in the order in which they are played."""
        return [
            episode
            for seed in range(self.seeds)
            for trial in range(self.trials + 1)
            for panel in (UNSEEN, TASKS)
            for episode in self.planned(seed, trial, panel)
        ]

    @property
    def unseen_rows(self) -> Sequence[dict]:
        return self.unseen.rows if self.unseen else ()

    def _memory(self, trial: int, panel: str) -> MemoryUse:
        if self.memory == "write" and panel == TASKS:
            return "read and write" if trial else "write"
        return "read" if trial and self.memory != "off" else "off"


class Adaptation:
    """Plays a plan, from where an earlier command stopped.

    A trial's tips are in the memory that is kept after it. A trial that writes and was interrupted begins again from
    the memory before it, since its tips cannot be told apart by then; all else goes on episode by episode.

    Args:
        gateway: that holds the memory.
        start: the memory of trial 0.
        drain_seconds: for the reflections of a trial's last episodes.
        show: called with each new result.
    """

    def __init__(
        self,
        plan: Plan,
        player: Player,
        results: Results,
        gateway: GatewayClient,
        start: Path,
        drain_seconds: float,
        show: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self._plan = plan
        self._player = player
        self._results = results
        self._gateway = gateway
        self._start = start
        self._drain_seconds = drain_seconds
        self._show = show

    def run(self) -> None:
        """Play all trials of all seeds."""
        for seed in range(self._plan.seeds):
            done, memory = memory_of(self._results.folder, seed)
            if self._plan.memory != "off" and done < self._plan.trials:
                self._gateway.restore((memory or self._start).absolute())
            for trial in range(done + 1, self._plan.trials + 1):
                self._play(seed, trial, UNSEEN)
                if self._plan.memory == "write":
                    self._results.drop(self._plan.part(seed, trial, TASKS))
                self._play(seed, trial, TASKS)
                if self._plan.memory == "write":
                    self._keep_memory(seed, trial)

    def _play(self, seed: int, trial: int, panel: str) -> None:
        play_missing(self._player, self._results, self._plan.planned(seed, trial, panel), self._show)

    def _keep_memory(self, seed: int, trial: int) -> None:
        self._gateway.drain(self._drain_seconds)
        folder = self._results.folder
        _, before = memory_of(folder, seed)
        temporary = folder / "new-memory.sqlite"
        temporary.unlink(missing_ok=True)
        self._gateway.snapshot(temporary.absolute())
        temporary.rename(folder / f"seed-{seed}-trial-{trial}.sqlite")  # from now on the trial is done
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
