"""Tables and pictures in one style, for all that the command line reports."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from empo2.recipe.evaluation.statistics import Interval

_WIDEST = 1000  # characters of a line
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "text.parse_math": False,  # a dollar sign in a name is one
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def table_of(*headings: str, text: Sequence[str] = ("",), **options: Any) -> Table:
    """Return an empty table.

    Args:
        text: headings of columns that hold text; all others hold numbers, which are never wrapped.
        options: of `rich.table.Table`.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        **{"show_edge": False, "pad_edge": False, "padding": 0, "title_justify": "left", "caption_justify": "left"}
        | options,
    )
    for heading in headings:
        words = heading in text
        table.add_column(Text(heading), justify="left" if words else "right", overflow="fold", no_wrap=not words)
    return table


def show_table(table: Table, console: Console) -> None:
    """Print a table as wide as it is: a narrow terminal wraps its lines, but no figure is cut."""
    width = console.width
    whole = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    console.width = max(whole, width)  # `print` takes no width beyond it
    try:
        console.print(table)
    finally:
        console.width = width


def interval_text(interval: Interval, sign: str = "") -> str:
    """Return a mean and, on a second line, its interval, if there is one; three digits each. Return "" for NaN."""
    if np.isnan(interval.mean):
        return ""
    mean, low, high = (_three_digits(value, sign) for value in interval)
    return mean if np.isnan(interval.low) else f"{mean}\n{low}…{high}"


def _three_digits(value: float, sign: str) -> str:
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 99.95 else 0
    return f"{value:{sign}.{decimals}f}"


@contextlib.contextmanager
def picture(target: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float], **options: Any) -> Iterator:
    """Yield a figure and its axes, [rows, columns]; write them to a PNG file when the block is left.

    Args:
        size: of the figure, width and height in inches.
        options: of `Figure.subplots`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
        figure.savefig(target, dpi=150)
