"""Read-only queries on a memory file: one of a running run, or a snapshot."""

import json
import sqlite3
from collections.abc import Collection
from typing import Literal, NamedTuple

import numpy as np

from empo2.memory.index import ENTRIES, cosine_similarities, load, unit
from empo2.memory.retrieval import Entries, Policy

type Order = Literal["best", "newest", "used", "value"]

_ORDERS: dict[Order, str] = {
    "best": "score DESC, id DESC",
    "newest": "created DESC, id DESC",
    "used": "shown DESC, score DESC, id DESC",
    "value": "value DESC, score DESC, id DESC",
}
_IN_SCOPES = "(:scopes IS NULL OR scope IN (SELECT value FROM json_each(:scopes)))"


class StoredTip(NamedTuple):
    """A tip as it is stored. ``shown`` counts the episodes that it was shown in, ``created`` is Unix time, seconds."""

    id: int
    scope: str
    episode: str
    text: str
    score: float
    success: bool | None
    value: float
    created: float
    shown: int


class ScopeCounts(NamedTuple):
    """The counts of a scope; ``searches``, ``hits`` (those that found tips) and ``score`` are sums over its plays."""

    scope: str
    tips: int
    entries: int
    states: int
    plays: int
    searches: int
    hits: int
    score: float


class Play(NamedTuple):
    """An episode for which tips were looked up; ``hits`` of its ``searches`` found some."""

    episode: str
    scope: str
    score: float
    success: bool | None
    searches: int
    hits: int
    created: float


class TipUse(NamedTuple):
    """A tip and the mean returns of its scope's plays that it was shown in, and of those that it was not."""

    tip: StoredTip
    shown_return: float
    other_return: float

    @property
    def gain(self) -> float:
        return self.shown_return - self.other_return


def embedder_of(db: sqlite3.Connection) -> tuple[str, int]:
    """Return the name of the embedder that made the keys, and their dimension."""
    meta = dict(db.execute("SELECT key, value FROM meta"))
    return meta["embedder"], meta["dimension"]


def scopes(db: sqlite3.Connection) -> list[str]:
    """Return all scopes with tips, states or plays, sorted."""
    found = db.execute("SELECT scope FROM tips UNION SELECT scope FROM states UNION SELECT scope FROM plays ORDER BY 1")
    return [scope for (scope,) in found]


def stored_tips(db: sqlite3.Connection, scopes: Collection[str] | None = None, *, order: Order) -> list[StoredTip]:
    """Return the tips of some or all scopes in the given order; ties are newest first."""
    rows = db.execute(
        "SELECT id, scope, episode, text, score, success, value, created,"
        " (SELECT count(*) FROM credits WHERE tip_id = tips.id) AS shown FROM tips"
        f" WHERE {_IN_SCOPES} ORDER BY {_ORDERS[order]}",
        {"scopes": _json(scopes)},
    )
    return [StoredTip._make((*row[:5], _success(row[5]), *row[6:])) for row in rows]


def episode_steps(db: sqlite3.Connection, tip: StoredTip) -> list[tuple[str, str]]:
    """Return state and action of each step of the episode that a tip was written after."""
    return db.execute("SELECT state, action FROM entries WHERE tip_id = ? ORDER BY step", (tip.id,)).fetchall()


def tip_uses(db: sqlite3.Connection, *, least: int = 2) -> list[TipUse]:
    """Return the tips with the plays that they were shown in, by descending gain; ties are most shown first.

    A gain is no effect: plays get better with time, and later ones are shown other tips.

    Args:
        least: plays that a tip was shown in, and plays that it was not, below which it is left out.
    """
    rows = db.execute(
        "SELECT tip_id, avg(score), (total - sum(score)) / (number - count(*)) FROM credits JOIN plays USING (episode)"
        " JOIN (SELECT scope, sum(score) AS total, count(*) AS number FROM plays GROUP BY scope) USING (scope)"
        " GROUP BY tip_id HAVING count(*) >= :least AND number - count(*) >= :least",
        {"least": least},
    )
    returns = {tip: means for tip, *means in rows}
    uses = [TipUse(tip, *returns[tip.id]) for tip in stored_tips(db, order="used") if tip.id in returns]
    return sorted(uses, key=lambda use: -use.gain)


def find_tips(
    db: sqlite3.Connection, scopes: Collection[str], key: np.ndarray, policy: Policy
) -> list[tuple[StoredTip, float]]:
    """Return the tips that a search for a state's key [dimension] would find if these scopes were one; best first.

    With each tip comes the cosine between the key and the tip's most similar state.

    Raises:
        ValueError: an unusable key.
        MemoryFileError: the stored keys are damaged.
    """
    dimension = embedder_of(db)[1]
    key = unit(key, dimension)
    tables = [load(db, ENTRIES, scope, dimension) for scope in scopes]
    columns = {name: np.concatenate([table[name] for table in tables]) for name in ("tip", "score", "value", "text")}
    similarities = np.concatenate([cosine_similarities(table["key"], key) for table in tables])
    rows = policy(Entries(similarities, columns["score"], columns["value"], columns["text"]))
    tips = {tip.id: tip for tip in stored_tips(db, scopes, order="best")}
    return [(tips[int(columns["tip"][row])], float(similarities[row])) for row in rows]


def scope_counts(db: sqlite3.Connection, scopes: Collection[str]) -> list[ScopeCounts]:
    """Return one row per scope, in the given order."""
    counts = [
        dict(db.execute(f"SELECT scope, {count} GROUP BY scope"))
        for count in (
            "count(*) FROM tips",
            "count(*) FROM entries JOIN tips ON tips.id = tip_id",
            "count(*) FROM states",
            "count(*) FROM plays",
            "sum(searches) FROM plays",
            "sum(hits) FROM plays",
            "sum(score) FROM plays",
        )
    ]
    return [ScopeCounts(scope, *(count.get(scope, 0) for count in counts)) for scope in scopes]


def plays(db: sqlite3.Connection, scopes: Collection[str] | None = None) -> list[Play]:
    """Return the plays of some or all scopes, in the order in which they were recorded."""
    rows = db.execute(
        f"SELECT episode, scope, score, success, searches, hits, created FROM plays WHERE {_IN_SCOPES} ORDER BY rowid",
        {"scopes": _json(scopes)},
    )
    return [Play._make((*row[:3], _success(row[3]), *row[4:])) for row in rows]


def _json(scopes: Collection[str] | None) -> str | None:
    return None if scopes is None else json.dumps(list(scopes))  # one parameter: SQLite limits their number


def _success(stored: int | None) -> bool | None:
    return None if stored is None else bool(stored)
