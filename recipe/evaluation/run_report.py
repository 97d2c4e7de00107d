"""Show a run's ``metrics.jsonl`` as a table of its steps, and write a page of all there is."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from empo2.recipe.evaluation.charts import validation_charts
from empo2.recipe.evaluation.page import write_page
from empo2.recipe.evaluation.run_lines import Line, lines_of
from empo2.recipe.evaluation.tables import interval_text, show_table, table_of
from empo2.recipe.run_folder import Row, read_metrics, step_mode


def show_runs(folders: Sequence[Path], target: Path, console: Console) -> None:
    """Print each run's table, then what `show_lines` does; raise as `read_metrics`."""
    for folder in folders:
        show_table(_steps_table(read_metrics(folder), title=Text(str(folder))), console)
    show_lines(lines_of(folders), target, console)


def _steps_table(rows: Sequence[Row], title: Text) -> Table:
    """Return a table with one line for each of `read_metrics`'s rows; metrics that were not measured stay empty."""
    columns = {
        "return": ("training/return", "{:.2f}"),
        "intrinsic": ("training/intrinsic_return", "{:.2f}"),
        "val\nreturn": ("val/return", "{:.2f}"),
        "memory": ("empo2/memory_size", "{:.0f}"),
        "tips\n/call": ("empo2/tips_injected_per_call", "{:.1f}"),
        "dropped": ("empo2/rollouts_dropped", "{:.0f}"),
        "time": ("timing_s/step", "{:.0f} s"),
    }
    table = table_of("step", "mode", *columns, text=["mode"], title=title)
    for row in rows:
        cells = (form.format(row[key]) if key in row else "" for key, form in columns.values())
        table.add_row(f"{row['step']:.0f}", _mode_text(row), *cells)
    return table


def _mode_text(row: Row) -> str:
    mode = step_mode(row) or ""
    if mode != "mixed":
        return mode
    return f"{row['empo2/memory_fraction']:.0%} mem, {row.get('empo2/off_policy_fraction', 0):.0%} off"


def show_lines(lines: Sequence[Line], folder: Path, console: Console) -> None:
    """Print what several lines come to, and write the page ``report.html`` to a folder."""
    if sum(len(line.runs) for line in lines) > 1:
        show_table(_figures_table(lines), console)
    print(f"report  {write_page(lines, folder / 'report.html')}")


def _figures_table(lines: Sequence[Line]) -> Table:
    """Return a table of the last validations without tips: means over seeds above their intervals."""
    charts = validation_charts(lines)
    charts = [chart for chart in charts if chart.key.endswith("success_rate")] or charts  # 80 columns hold no more
    table = table_of("", "seeds", "step", *(chart.title.lower().replace(", ", ",\n") for chart in charts))
    for line in lines:
        ends = [chart.end(line) for chart in charts]
        seeds = dict.fromkeys(str(end.seeds) for end in ends if end)  # of panels that came later, others
        steps = dict.fromkeys(str(end.step) for end in ends if end)
        cells = (interval_text(end.value) if end else "" for end in ends)
        table.add_row(Text(line.label), ", ".join(seeds), ", ".join(steps), *cells)
    return table
