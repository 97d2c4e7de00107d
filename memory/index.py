"""The store's index in RAM: unit keys, cosine similarity, and a growing columnar table, read from the memory file."""

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from empo2.memory.file import MemoryFileError

_CHUNK = 4096  # rows read at once; one by one takes more time, all at once twice the memory
_BLOCK = 64  # keys that are multiplied at once: 15 MB for 60,000 states
_ROUNDING = 1e-4  # more than a product of unit keys can be off by
# Queries of `load`, oldest rows first. The order of entries is that of two indices of the file, so no keys are sorted;
# `tip`, its id, is ascending, since an episode is stored in one transaction.
ENTRIES = (
    "SELECT entries.id AS id, tip_id AS tip, key, score, value, text FROM tips JOIN entries ON tips.id = tip_id"
    " WHERE scope = ? ORDER BY tips.id, entries.id"
)
STATES = "SELECT id, key, visits FROM states WHERE scope = ? ORDER BY id"
_FLOATS = ("score", "value")


def unit(key: ArrayLike, dimension: int) -> np.ndarray:
    """Return `key` as a float32 vector [dimension] of L2 norm 1.

    Raises:
        ValueError: another shape, a value that is not finite, or a zero vector.
    """
    vector = np.asarray(key, dtype=np.float32)
    if vector.shape != (dimension,):
        raise ValueError(f"key has shape {vector.shape}; this memory holds keys of shape ({dimension},)")
    norm = np.linalg.norm(vector)
    if not (np.isfinite(norm) and norm > 0):
        raise ValueError(f"key has L2 norm {norm}; it must be finite and above 0")
    return vector / norm


def cosine_similarities(keys: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the cosines of unit keys [n, dimension] with one unit key [dimension], float32 [n].

    Uses `vecdot`, not `@`: a matrix product sums its last rows in a different order, so equal keys would differ in
    the seventh digit and noise would break ties. Both take the same time.
    """
    return np.vecdot(keys, key)


def near(keys: np.ndarray, wanted: np.ndarray, threshold: float) -> Iterator[np.ndarray]:
    """Yield for each of the unit keys ``wanted`` [m, dimension] the rows of ``keys`` with a cosine above the threshold.

    Matrix products find who may be near, at a tenth of the time; `cosine_similarities` settles it, so that what is
    found for a key does not depend on those beside it.
    """
    for first in range(0, len(wanted), _BLOCK):
        block = wanted[first : first + _BLOCK]
        for key, close in zip(block, block @ keys.T > threshold - _ROUNDING, strict=True):
            rows = np.flatnonzero(close)
            yield rows[cosine_similarities(keys[rows], key) > threshold]


class ColumnTable:
    """Named numpy columns of equal length; rows are appended at the end and mostly dropped at the front.

    Both take amortized O(1) per row: a full buffer is replaced by one of twice the live rows.

    Args:
        columns: the first rows, [n, ...] per column; they also give shapes and dtypes.
    """

    def __init__(self, **columns: np.ndarray):
        self._buffers = columns
        self._start = 0
        self._end = len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, column: str) -> np.ndarray:
        """Return the live rows of a column, oldest first, as a view that is valid until the next append."""
        return self._buffers[column][self._start : self._end]

    def append(self, count: int, **rows: ArrayLike) -> None:
        """Add `count` rows: [count, ...] per column, or one value for all of them."""
        if self._end + count > len(next(iter(self._buffers.values()))):
            self._grow(count)
        for column, buffer in self._buffers.items():
            buffer[self._end : self._end + count] = rows[column]
        self._end += count

    def drop_oldest(self, count: int) -> None:
        self._start += count

    def drop(self, column: str, values: Collection[int]) -> None:
        """Drop every row that has one of the values in the column."""
        keep = ~np.isin(self[column], list(values))
        self._buffers = {name: self[name][keep] for name in self._buffers}
        self._start, self._end = 0, int(keep.sum())

    def _grow(self, count: int) -> None:
        live = len(self)
        for column, old in self._buffers.items():
            new = np.empty((max(64, 2 * live, live + count), *old.shape[1:]), old.dtype)
            new[:live] = self[column]
            self._buffers[column] = new
        self._start, self._end = 0, live


def load(db: sqlite3.Connection, query: str, scope: str, dimension: int) -> ColumnTable:
    """Return a scope's `ENTRIES` or `STATES`; `text` is a number, equal for equal texts, `key` float32 [dimension].

    Raises:
        MemoryFileError: the file is damaged, or has a key of another length than `dimension`.
    """
    try:
        cursor = db.execute(query, (scope,))
        names = [column[0] for column in cursor.description]
        columns = {name: np.empty(0, np.float64 if name in _FLOATS else np.int64) for name in names}
        table = ColumnTable(**columns | {"key": np.empty((0, dimension), np.float32)})
        while rows := cursor.fetchmany(_CHUNK):
            read: dict[str, Any] = dict(zip(names, zip(*rows, strict=True), strict=True))
            read["key"] = _matrix(read["key"], dimension)
            if "text" in read:
                read["text"] = [hash(text) for text in read["text"]]
            table.append(len(rows), **read)
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        _, _, path = db.execute("PRAGMA database_list").fetchone()
        raise MemoryFileError(f"{path}: is damaged: {error}; go back to a snapshot of it") from error
    return table


def _matrix(keys: Sequence[bytes], dimension: int) -> np.ndarray:
    for key in keys:
        if not isinstance(key, bytes) or len(key) != 4 * dimension:
            size = f"{4 * dimension} bytes ({dimension} float32)"
            raise ValueError(f"it holds the key {key!r:.40}, where each has {size}")
    return np.frombuffer(b"".join(keys), np.float32).reshape(-1, dimension)
