"""``empo2 report``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe.errors import ConfigError


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER", help="Runs such as runs/demo, or results of empo2 eval, or of empo2 adapt."),
    ],
) -> None:
    """Print tables and draw curves of runs, evaluations or adaptations.

    Of runs, report.html shows curves, figures, settings that differ, the tips that helped most and least, and episodes
    as they were trained: one file that needs no network. Runs that differ only in their seed are one line with a band,
    the 95 % interval. It is in the run's folder, or beside the first of several.

    Of several adaptations, one picture shows all curves. Of several evaluations, the differences from the first are
    printed: task by task, with 95 % intervals.
    """
    from rich.console import Console

    from empo2.recipe.evaluation.adaptation_report import show_adaptations
    from empo2.recipe.evaluation.episode_results import kind_of
    from empo2.recipe.evaluation.evaluation_report import draw_evaluations, show_evaluations
    from empo2.recipe.evaluation.run_report import show_runs

    os.umask(0o077)  # chats and tips are for their owner only
    folders = [*{folder.resolve(): folder for folder in folders}.values()]  # one given twice is one seed
    kinds = {folder: kind_of(folder) for folder in folders}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{folder} is of a {kind}" for folder, kind in kinds.items())
        raise ConfigError(f"FOLDER: give folders of one kind; {told}")
    console, target = Console(), folders[0] if len(folders) == 1 else folders[0].resolve().parent
    match kinds[folders[0]]:
        case "eval":
            print(f"picture  {draw_evaluations(show_evaluations(folders, console), target)}")
        case "adapt":
            print(f"curves  {show_adaptations(folders, console, target)}")
        case _:
            show_runs(folders, target, console)
