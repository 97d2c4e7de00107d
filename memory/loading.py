"""Load the entries and the visited states of a scope from the memory file into RAM."""

import sqlite3
from collections.abc import Iterator, Sequence

import numpy as np

from empo2.memory.file import MemoryFileError
from empo2.memory.index import ColumnTable

_CHUNK = 4096  # rows read at once; one by one takes more time, all at once twice the memory


def load_entries(db: sqlite3.Connection, scope: str, dimension: int) -> ColumnTable:
    """Return the scope's entries, oldest first; `tip` is ascending, since an episode is stored in one transaction.

    Columns: id, tip (its id), key [dimension], score, value (of the tip), and text (a number, equal for equal texts).

    Raises:
        MemoryFileError: a key of another length than `dimension`.
    """
    table = ColumnTable(
        id=np.empty(0, np.int64),
        tip=np.empty(0, np.int64),
        key=np.empty((0, dimension), np.float32),
        score=np.empty(0, np.float64),
        value=np.empty(0, np.float64),
        text=np.empty(0, np.int64),
    )
    # This order is that of two indices of the file, so no keys are sorted.
    cursor = db.execute(
        "SELECT entries.id, tip_id, key, score, value, text FROM tips JOIN entries ON tips.id = tip_id"
        " WHERE scope = ? ORDER BY tips.id, entries.id",
        (scope,),
    )
    for ids, tips, keys, scores, values, texts in _column_chunks(cursor):
        table.append(
            len(ids),
            id=ids,
            tip=tips,
            key=_matrix(keys, dimension, db),
            score=scores,
            value=values,
            text=[hash(text) for text in texts],
        )
    return table


def load_states(db: sqlite3.Connection, scope: str, dimension: int) -> ColumnTable:
    """Return the scope's visited states, oldest first.

    Columns: id, key [dimension], visits, and text (a number, equal for equal states).

    Raises:
        MemoryFileError: a key of another length than `dimension`.
    """
    table = ColumnTable(
        id=np.empty(0, np.int64),
        key=np.empty((0, dimension), np.float32),
        visits=np.empty(0, np.int64),
        text=np.empty(0, np.int64),
    )
    cursor = db.execute("SELECT id, key, visits, state FROM states WHERE scope = ? ORDER BY id", (scope,))
    for ids, keys, visits, states in _column_chunks(cursor):
        table.append(
            len(ids), id=ids, key=_matrix(keys, dimension, db), visits=visits, text=[hash(state) for state in states]
        )
    return table


def _column_chunks(cursor: sqlite3.Cursor) -> Iterator[tuple[tuple, ...]]:
    while rows := cursor.fetchmany(_CHUNK):
        yield tuple(zip(*rows, strict=True))


def _matrix(keys: Sequence[bytes], dimension: int, db: sqlite3.Connection) -> np.ndarray:
    for key in keys:
        if not isinstance(key, bytes) or len(key) != 4 * dimension:
            _, _, path = db.execute("PRAGMA database_list").fetchone()
            raise MemoryFileError(
                f"{path}: is damaged: it holds the key {key!r:.40}, where each has {4 * dimension} bytes"
                f" ({dimension} float32); go back to a snapshot of it"
            )
    return np.frombuffer(b"".join(keys), np.float32).reshape(-1, dimension)
