"""``empo2 show``."""

from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe.errors import Empo2Error

EXAMPLES = """Examples: empo2 show runs/demo, empo2 show runs/demo --dropped, empo2 show runs/demo 3f2a9c1e."""

_PREFIX = 8  # characters of an id in the list
_LISTED_STEPS = 10


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.")],
    rollout: Annotated[
        str | None, typer.Argument(metavar="ROLLOUT", help="The beginning of a rollout's id; without it, a list.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="List the rollouts of one step.")] = None,
    dropped: Annotated[bool, typer.Option("--dropped", help="List those that were dropped.")] = False,
) -> None:
    """Read an episode of a run: its turns, tips, reward and mode, what was trained, and why it was dropped.

    Without ROLLOUT, list those of the last ten steps, and count why rollouts of the steps that are kept were dropped.
    """
    from rich.console import Console

    from empo2.recipe.cli.show_episode import print_episode, rollouts_table
    from empo2.recipe.rollout_log import read_calls, read_dropped, read_rollouts
    from empo2.recipe.run_folder import ROLLOUTS

    folder = run / ROLLOUTS
    console = Console(highlight=False, markup=False, emoji=False)
    found = read_rollouts(folder, rollout or "", step, last=None if rollout else _LISTED_STEPS)
    if rollout is not None:
        if not found:
            raise Empo2Error(f"{run}: no rollout {rollout!r} is kept; `empo2 show {run}` lists the last ones")
        if len({each.id for each in found}) > 1:
            ids = ", ".join(each.id[: len(rollout) + _PREFIX] for each in found[:3])
            raise Empo2Error(f"{run}: {len(found)} rollouts begin with {rollout!r}, such as {ids}; give more of the id")
        print_episode(console, run, found[-1], read_calls(folder, found[-1].id))
        return
    causes = read_dropped(folder, step)
    console.print(rollouts_table([each for each in found if each.dropped or not dropped], _PREFIX))
    for cause in causes:
        console.print(f"dropped  {cause.told(run)}", soft_wrap=True)
