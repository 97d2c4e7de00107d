"""``empo2 memory values`` and ``empo2 memory similarities``."""

from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from empo2.memory.browse import embedder_of
from empo2.memory.file import reading
from empo2.recipe.baselines.memrl.values import (
    correlation,
    failures_among_best,
    first_state_cosines,
    uses_of_tips,
    value_bins,
)
from empo2.recipe.cli.memory import Memory, Scope, chosen_scopes, one_line_errors
from empo2.recipe.config import load_settings
from empo2.recipe.evaluation.tables import table_of

_console = Console(highlight=False, markup=False, emoji=False)

app = typer.Typer()


@app.command(epilog="\b\nexample:\n  empo2 memory values runs/demo --learning-rate 0.3 --return-scale 0.01")
@one_line_errors()
def values(
    memory: Memory,
    learning_rate: Annotated[
        float | None, typer.Option(help="memory.value_learning_rate of the run.  [default: config.yaml's]")
    ] = None,
    return_scale: Annotated[
        float | None,
        typer.Option(help="algorithm.return_scale of the run, or 1 / its range.  [default: config.yaml's, 1]"),
    ] = None,
    scope: Scope = None,
) -> None:
    """Show how well the learned values predicted success: the value of each tip before each episode that saw it."""
    defaults = load_settings()
    rate = defaults.memory.value_learning_rate if learning_rate is None else learning_rate
    scale = defaults.algorithm.scale if return_scale is None else return_scale
    with reading(memory) as db:
        chosen = chosen_scopes(db, scope)
        uses = uses_of_tips(db, chosen, rate, scale)
        failures = failures_among_best(db, chosen)
    if not uses:
        _console.print("no tip has been shown yet")
        return
    bins = value_bins(uses)
    table = table_of("Q before the episode", "uses", "mean Q", "success", padding=(0, 1, 0, 0))
    for each in bins:
        table.add_row(f"{each.low:.2f} … {each.high:.2f}", f"{each.uses:,}", f"{each.value:.2f}", f"{each.success:.0%}")
    _console.print(table)
    binned = correlation([(each.value, each.success) for each in bins])
    _console.print(f"\nPearson's r: {binned:.3f} of the bins, {correlation(uses):.3f} of the {len(uses):,} uses")
    _console.print(f"of the tenth of the tips with the highest Q, {failures:.0%} come from failed episodes")


@app.command(epilog="\b\nexample:\n  empo2 memory similarities runs/demo")
@one_line_errors()
def similarities(memory: Memory, scope: Scope = None) -> None:
    """Show how similar the first states of different tasks are, and the settings that follow for MemRL's retrieval."""
    with reading(memory) as db:
        states, cosines = first_state_cosines(db, chosen_scopes(db, scope))
        name, _ = embedder_of(db)
    figures = (cosines.mean(), cosines.std(), np.quantile(cosines, 0.8))
    mean, deviation, threshold = (f"{figure:.3f}" for figure in figures)
    settings = f"memory.min_similarity={threshold} memory.similarity_statistics='[{mean}, {deviation}]'"
    _console.print(f"{states:,} first states, {len(cosines):,} pairs, keys of {name}")
    _console.print(f"cosine: mean {mean}, standard deviation {deviation}; 20 % above {threshold}")
    _console.print(settings, soft_wrap=True)
