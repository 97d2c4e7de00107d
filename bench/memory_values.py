"""What MemRL (arXiv 2601.03192) builds on, measured in a memory.

    .venv/bin/python bench/memory_values.py values runs/memrl/seed-0-trial-10.sqlite --returns -100 100
    .venv/bin/python bench/memory_values.py similarities runs/memrl/seed-0-trial-10.sqlite

- `values`: how well the learned values predicted success, tip by tip and episode by episode;
- `similarities`: how similar the first states of different tasks are, and the settings that follow for its retrieval.
"""

import sqlite3
import sys
from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console

from empo2.memory.browse import embedder_of
from empo2.memory.file import MemoryFileError, reading
from empo2.recipe.cli.memory import Memory, Scope, chosen_scopes, one_line_errors
from empo2.recipe.config import load_settings
from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.tables import table_of
from empo2.recipe.protocol import place_in_range

_ROUNDING = 1e-6

_EXAMPLES = """\b
examples:
  bench/memory_values.py values runs/demo --learning-rate 0.3 --returns 0 100
  bench/memory_values.py similarities runs/demo --scope task=find-animal"""
_console = Console(highlight=False, markup=False, emoji=False)
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure in a memory what MemRL builds on: that values predict success, and that states can be told apart.",
    epilog=_EXAMPLES,
)


@app.command()
@one_line_errors()
def values(
    memory: Memory,
    learning_rate: Annotated[
        float | None, typer.Option(help="memory.value_learning_rate of the run.  [default: config.yaml's]")
    ] = None,
    returns: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="WORST BEST",
            help="algorithm.failure_return and success_return of the run.  [default: config.yaml's, 0 and 1]",
        ),
    ] = None,
    scope: Scope = None,
) -> None:
    """Show how well the learned values predicted success.

    Each use of a tip counts with the value before the episode that saw it, in ten bins with their share of successes;
    Pearson's r is 0.861 of MemRL's bins. Of the best tips, 12 % come from failures in the paper. The values are learned
    again from the recorded plays, so give the run's rate and range of returns.
    """
    defaults = load_settings()
    rate = defaults.memory.value_learning_rate if learning_rate is None else learning_rate
    worst, best = returns or (defaults.algorithm.failure_return, defaults.algorithm.success_return)
    with reading(memory) as db:
        chosen = chosen_scopes(db, scope)
        uses = uses_of_tips(db, chosen, rate, worst, best)
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


@app.command()
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


class Use(NamedTuple):
    """A tip in an episode that was shown it: its learned value before, and whether the episode succeeded."""

    value: float
    success: bool


class Bin(NamedTuple):
    """The uses whose values lie between two bounds: their number, their mean value, and their share of successes."""

    low: float
    high: float
    uses: int
    value: float
    success: float


def uses_of_tips(
    db: sqlite3.Connection, scopes: Collection[str], learning_rate: float, worst: float, best: float
) -> list[Use]:
    """Return every use of a tip in these scopes, by learning the values again, play by play.

    The value is the one before the episode: that after it has learned from the very success that it is to predict.

    Args:
        learning_rate, worst, best: with which the values were learned, and the returns that were -1 and 1.

    Raises:
        MemoryFileError: this does not end in the stored values: they were learned otherwise.
    """
    values: dict[int, float] = {}
    uses = []
    for tip, scope, score, success in db.execute(
        "SELECT tip_id, scope, score, success FROM plays JOIN credits ON credits.episode = plays.episode"
        " ORDER BY plays.rowid, tip_id"
    ):
        before = values.get(tip, 0.0)
        values[tip] = before + learning_rate * (place_in_range(score, worst, best) - before)
        if success is not None and scope in scopes:
            uses.append(Use(before, bool(success)))
    for tip, stored in db.execute("SELECT id, value FROM tips"):
        if abs(values.get(tip, 0.0) - stored) > _ROUNDING:
            raise MemoryFileError(
                f"tip {tip} has the value {stored:.4g}, but its uses make it {values.get(tip, 0.0):.4g}: the values"
                " were learned with another rate or range, in paired groups, or in part before an import"
            )
    return uses


def value_bins(uses: Sequence[Use], count: int = 10) -> list[Bin]:
    """Return the uses in intervals of equal width between the lowest and the highest value; empty ones are left out."""
    values, successes = np.array(uses, float).T
    edges = np.linspace(values.min(), values.max(), count + 1)
    places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, count - 1)
    inside = [(place, places == place) for place in np.unique(places)]
    return [
        Bin(edges[place], edges[place + 1], int(chosen.sum()), values[chosen].mean(), successes[chosen].mean())
        for place, chosen in inside
    ]


def correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Pearson's r; NaN if it is not defined."""
    first, second = np.array(pairs, float).T
    if len(pairs) < 2 or not np.ptp(first) or not np.ptp(second):
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def failures_among_best(db: sqlite3.Connection, scopes: Collection[str]) -> float:
    """Return which share of the tenth of the tips with the highest values comes from failed episodes; NaN without tips.

    Tips with a value equal to that of the last one are among them.
    """
    rows = db.execute("SELECT scope, value, success FROM tips WHERE success IS NOT NULL ORDER BY value DESC")
    known = [(value, success) for scope, value, success in rows if scope in scopes]
    if not known:
        return float("nan")
    least, _ = known[max(1, round(len(known) / 10)) - 1]
    return float(np.mean([not success for value, success in known if value >= least]))


def first_state_cosines(db: sqlite3.Connection, scopes: Collection[str]) -> tuple[int, np.ndarray]:
    """Return how many different first states the episodes had that left tips in these scopes, and all pairs' cosines.

    MemRL (arXiv 2601.03192) takes as δ the cosine that 20 % of its pairs of tasks exceed, and its code measures
    similarities in a fixed mean and deviation; both hold for its encoder alone.

    Raises:
        MemoryFileError: fewer than two different first states.
    """
    dimension, chosen, keys = embedder_of(db)[1], set(scopes), {}
    query = "SELECT scope, state, key FROM entries JOIN tips ON tips.id = tip_id WHERE step = 0 ORDER BY entries.id"
    for scope, state, key in db.execute(query):
        if scope in chosen:
            keys.setdefault(state, np.frombuffer(key, np.float32, dimension))
    if len(keys) < 2:
        raise MemoryFileError(f"it has {len(keys)} first states of episodes; two different ones make a pair")
    matrix = np.stack(list(keys.values()))
    return len(keys), (matrix @ matrix.T)[np.triu_indices(len(matrix), 1)].astype(np.float64)


if __name__ == "__main__":
    try:
        app()
    except Empo2Error as error:
        sys.exit(f"memory_values.py: error: {error}")
