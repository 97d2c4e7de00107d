"""Show the progress of a run: a bar on a terminal, one line per step elsewhere."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from empo2.recipe.run_folder import step_mode

type Metrics = dict[str, Any]


class NewMetrics:
    """Reader of the lines that are added to a metrics file, which need not exist yet.

    A run that is continued drops the lines after its last checkpoint first; those that stay are not new.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position = file.stat().st_size if file.exists() else 0

    def read(self) -> list[Metrics]:
        """Return the metrics in the complete lines added since the last call or the construction."""
        if not self._file.exists():
            return []
        self._position = min(self._position, self._file.stat().st_size)
        with self._file.open("rb") as stream:
            stream.seek(self._position)
            lines = [line for line in stream if line.endswith(b"\n")]
        self._position += sum(map(len, lines))
        return [json.loads(line) for line in lines]


def step_summary(metrics: Metrics) -> str:
    """Return one line on a step: return, mode, tips, seconds, failures, and the validation if there was one."""
    parts = []
    if "training/return" in metrics:
        parts.append(
            f"return {metrics['training/return']:7.2f}  {step_mode(metrics):18}"
            f"  {metrics['empo2/memory_size']:.0f} tips  {metrics.get('timing_s/step', 0):.0f} s"
        )
        for key in ("rollouts_dropped", "memory_failures"):
            if metrics.get(f"empo2/{key}"):
                parts.append(f"{metrics[f'empo2/{key}']:.0f} {key.replace('_', ' ')}")
    if metrics.get("val/return") is not None:
        parts.append(f"validation {metrics['val/return']:.2f}")
        for key, name in (("train/return", "training tasks"), ("train/memory_return", "with tips")):
            if metrics.get(f"val/{key}") is not None:
                parts[-1] += f", {name} {metrics[f'val/{key}']:.2f}"
    return "  ".join(parts)


@contextlib.contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[str, int | None], None]]:
    """Yield a function that shows a text and, unless it is None, the number of the step it is about."""
    if not console.is_terminal:
        yield lambda text, step: console.print(f"step {step}/{steps}  {text}" if step is not None else text)
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps)
        yield lambda text, step: bar.update(task, description=text, completed=step)
