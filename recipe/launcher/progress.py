"""Show the progress of a run: a line that changes on a terminal, and few lines that stay."""

import json
import math
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from empo2.recipe.marked_lines import STAGES
from empo2.recipe.printed import printable
from empo2.recipe.protocol import StepProgress
from empo2.recipe.run_folder import losses, step_mode

type Metrics = dict[str, Any]

_QUIET_SECONDS = 60  # between two lines that are about the same step


class NewLines:
    """Reader of the lines that are added to a file, which need not exist yet.

    A run that is continued drops the metrics after its last checkpoint first; those that stay are not new.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position = file.stat().st_size if file.exists() else 0

    def read(self) -> list[bytes]:
        """Return the complete lines added since the last call or the construction."""
        if not self._file.exists():
            return []
        self._position = min(self._position, self._file.stat().st_size)
        with self._file.open("rb") as stream:
            stream.seek(self._position)
            lines = [line for line in stream if line.endswith(b"\n")]
        self._position += sum(map(len, lines))
        return lines

    def rows(self) -> list[Metrics]:
        """Return what new lines of JSON hold, without what was not measured or is not finite."""
        rows = (json.loads(line) for line in self.read())
        return [{key: value for key, value in row.items() if value is not None} for row in rows]


def step_summary(metrics: Metrics) -> str:
    """Return one line on a step: return, mode, tips, seconds, failures, and the validation if there was one."""
    parts = []
    if "empo2/memory_fraction" in metrics:
        parts.append(
            f"return {metrics.get('training/return', math.nan):7.2f}  {step_mode(metrics):18}"
            f"  {metrics.get('empo2/memory_size', 0):.0f} tips  {metrics.get('timing_s/step', 0):.0f} s"
        )
        if dropped := metrics.get("empo2/rollouts_dropped"):
            fix = "empo2 show --dropped; agent.time_limit, algorithm.failed_rollout_return"
            parts.append(f"{dropped:.0f} rollouts dropped ({fix})")
        parts += losses(metrics)
    if "val/return" in metrics:
        parts.append(f"validation {metrics['val/return']:.2f}")
        for key, name in (("train/return", "training tasks"), ("train/memory_return", "with tips")):
            if f"val/{key}" in metrics:
                parts[-1] += f", {name} {metrics[f'val/{key}']:.2f}"
    return "  ".join(parts)


class RunProgress:
    """What a person who waits for a run sees: lines that stay and, on a terminal, one that changes.

    Args:
        done: of the steps, when a run is continued.
        started: ``time.monotonic()`` at the start.

    Attributes:
        stage: what is being loaded; "" for nothing any more, None before anything is.
    """

    def __init__(self, console: Console, steps: int, *, done: int = 0, started: float) -> None:
        self._console = console
        self._steps, self._done = steps, done
        self._started = self._said = started
        self.stage: str | None = None
        self._played = False
        counts = (SpinnerColumn(), TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20))
        columns = (*counts, TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self._console.print(printable(text), soft_wrap=True, highlight=False, markup=False)

    def loading(self, stage: str) -> None:
        """Show what is being loaded, and what is left; "" for nothing."""
        if stage == self.stage:
            return
        self.stage, self._said = stage, time.monotonic()
        left = STAGES[STAGES.index(stage) + 1 :] if stage else ()
        text = f"loading {stage}" if stage else "all is loaded"
        text += f"; then {', '.join(left)}" if left else ""
        self._bar.update(self._task, description=text)
        if self._bar.disable:
            self.say(f"{self._said - self._started:4.0f} s  {text}")

    def step(self, metrics: Metrics) -> None:
        """Show a step that is done."""
        self._done, self._said = metrics["step"], time.monotonic()
        self.say(f"step {self._done}/{self._steps}  {step_summary(metrics)}")
        self._bar.update(self._task, completed=self._done)

    def playing(self, progress: StepProgress) -> None:
        """Show how far the current step is: on a terminal at once, elsewhere once a minute."""
        if progress.rollouts and not self._played:
            self._played = True
            self.say(f"first rollout {time.monotonic() - self._started:.0f} s after the start")
        if not self._played:
            return
        text = _playing(progress)
        self._bar.update(self._task, description=text)
        if self._bar.disable and time.monotonic() - self._said >= _QUIET_SECONDS:
            self._said = time.monotonic()
            self.say(f"step {self._done + 1}/{self._steps}  {text}" if not progress.validation else text)


def _playing(progress: StepProgress) -> str:
    if not progress.rollouts:
        return "rollouts are done; the policy is updated"
    kind = "validation rollouts" if progress.validation else "rollouts"
    counts = f"{kind} {progress.ended}/{progress.rollouts}  {progress.calls} model calls"
    return counts + (f"  {progress.tips} tips written" if progress.tips else "")
