"""What MemRL builds on, measured in a memory: how well learned values predict success, how similar first states are."""

import sqlite3
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from empo2.memory.browse import embedder_of
from empo2.memory.file import MemoryFileError

_ROUNDING = 1e-6


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
    db: sqlite3.Connection, scopes: Collection[str], learning_rate: float, return_scale: float
) -> list[Use]:
    """Return every use of a tip in these scopes, by learning the values again, play by play.

    The value is the one before the episode: that after it has learned from the very success that it is to predict.

    Args:
        learning_rate, return_scale: with which the values were learned.

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
        values[tip] = before + learning_rate * (return_scale * score - before)
        if success is not None and scope in scopes:
            uses.append(Use(before, bool(success)))
    for tip, stored in db.execute("SELECT id, value FROM tips"):
        if abs(values.get(tip, 0.0) - stored) > _ROUNDING:
            raise MemoryFileError(
                f"tip {tip} has the value {stored:.4g}, but its uses make it {values.get(tip, 0.0):.4g}: the values"
                " were learned with another rate or scale, in paired groups, or in part before an import"
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
