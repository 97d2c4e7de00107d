"""``empo2 report``."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, such as runs/demo.")],
) -> None:
    """Print the table of a run's steps and draw its curves.

    The returns of several runs are drawn in one picture.
    """
    show_report(runs)


def show_report(runs: list[Path]) -> None:
    """Print each run's table, and the path of the picture that shows the curves of all runs."""
    from empo2.recipe.evaluation.report import draw_curves, print_table

    for run in runs:
        print_table(run)
    print(f"curves  {draw_curves(*runs)}")
