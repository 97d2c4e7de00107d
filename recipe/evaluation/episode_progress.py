"""Show how many episodes are played: a bar on a terminal, a line for every tenth elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from empo2.recipe.evaluation.episode_results import Result


@contextlib.contextmanager
def progress(console: Console, done: int, total: int) -> Iterator[Callable[[Result], None]]:
    """Yield a function to call with each new result; of ``total`` episodes, ``done`` have one already."""
    returns: list[float] = []
    failed, started = 0, time.monotonic()

    def count(result: Result) -> str:
        nonlocal failed
        if result.return_ is None:
            failed += 1
        else:
            returns.append(result.return_)
        mean = f"mean return {sum(returns) / len(returns):.1f}" if returns else "no return yet"
        return f"{mean}, {failed} failed" if failed else mean

    if not console.is_terminal:

        def line(result: Result) -> None:
            text, played = count(result), done + len(returns) + failed
            if played * 10 // total > (played - 1) * 10 // total:
                seconds = time.monotonic() - started
                console.print(f"{played}/{total} episodes  {text}  {seconds:.0f} s", highlight=False)

        yield line
        return
    columns = (
        TextColumn("episodes"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda result: bar.update(task, description=count(result), advance=1)
