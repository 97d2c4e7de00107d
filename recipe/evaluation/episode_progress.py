"""Show how many episodes are played: a bar on a terminal, a line for every tenth elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from empo2.recipe.evaluation.episode_results import Result

_COLUMNS = (
    TextColumn("episodes"),
    MofNCompleteColumn(),
    BarColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.description}"),
)


@contextlib.contextmanager
def progress(console: Console, done: int, total: int) -> Iterator[Callable[[Result], None]]:
    """Yield a function to call with each new result; of ``total`` episodes, ``done`` have one already."""
    results: list[Result] = []
    started = time.monotonic()
    with Progress(*_COLUMNS, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=done)

        def show(result: Result) -> None:
            results.append(result)
            returns = [each.return_ for each in results if each.return_ is not None]
            text = f"mean return {sum(returns) / len(returns):.1f}" if returns else "no return yet"
            if failed := len(results) - len(returns):
                text += f", {failed} failed"
            bar.update(task, description=text, advance=1)
            played = done + len(results)
            if not console.is_terminal and played * 10 // total > (played - 1) * 10 // total:
                print(f"{played}/{total} episodes  {text}  {time.monotonic() - started:.0f} s", flush=True)

        yield show
