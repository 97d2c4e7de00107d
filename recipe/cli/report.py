"""``empo2 report``."""

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

    Of several runs or adaptations, one picture shows all curves. Of several evaluations, the differences from the first
    are printed: task by task, with 95 % intervals.
    """
    from rich.console import Console

    from empo2.recipe.evaluation.adaptation_report import show_adaptations
    from empo2.recipe.evaluation.compare import compare
    from empo2.recipe.evaluation.results import kind_of

    kinds = {folder: kind_of(folder) for folder in folders}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{folder} is of a {kind}" for folder, kind in kinds.items())
        raise ConfigError(f"FOLDER: give folders of one kind; {told}")
    match kinds[folders[0]]:
        case "eval":
            print(f"picture  {compare(folders, Console())}")
        case "adapt":
            print(f"curves  {show_adaptations(folders, Console())}")
        case _:
            show_report(folders)


def show_report(runs: list[Path]) -> None:
    """Print each run's table, and the path of the picture that shows the curves of all runs."""
    from empo2.recipe.evaluation.report import draw_curves, print_table

    for run in runs:
        print_table(run)
    print(f"curves  {draw_curves(*runs)}")
