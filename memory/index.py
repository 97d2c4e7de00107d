"""What the store keeps in RAM: unit keys, cosine similarity and a growing columnar table."""

import numpy as np
from numpy.typing import ArrayLike


def unit(key: ArrayLike, dimension: int) -> np.ndarray:
    """`key` as a float32 vector [dimension] of L2 norm 1.

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
    """Cosine of unit keys [n, dimension] with one unit key [dimension]: float32 [n].

    `vecdot` and not `@`: a matrix product sums its last rows in another order than the others, so that
    equal keys would differ in the seventh digit and ties would be broken by noise. Both take the same time.
    """
    return np.vecdot(keys, key)


class ColumnTable:
    """Named numpy columns of one length; rows are appended at the end and dropped at the front.

    Both are O(1) per row in the long run: a full buffer is replaced by one of twice the live rows.
    """

    def __init__(self, **columns: np.ndarray):
        self._buffers = columns
        self._start = 0
        self._end = len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, column: str) -> np.ndarray:
        """The live rows of a column, oldest first: a view, valid until the next append."""
        return self._buffers[column][self._start : self._end]

    def append(self, **rows: ArrayLike) -> None:
        """Add one value to each column."""
        if self._end == len(next(iter(self._buffers.values()))):
            self._double()
        for column, buffer in self._buffers.items():
            buffer[self._end] = rows[column]
        self._end += 1

    def drop_oldest(self, count: int) -> None:
        self._start += count

    def _double(self) -> None:
        live = len(self)
        for column, old in self._buffers.items():
            new = np.empty((max(64, 2 * live), *old.shape[1:]), old.dtype)
            new[:live] = self[column]
            self._buffers[column] = new
        self._start, self._end = 0, live
