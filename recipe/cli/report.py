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
    """Print the table of each run and the file of the picture that is drawn of all."""
    from empo2.recipe.evaluation.report import draw_curves, print_table

    for run in runs:
        print_table(run)
    print(f"curves  {draw_curves(*runs)}")
