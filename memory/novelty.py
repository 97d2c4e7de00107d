"""How often the agents have been near a state: the count n of the intrinsic reward r = 1/n."""

import sqlite3

import numpy as np

from empo2.memory.index import ColumnTable, cosine_similarities
from empo2.memory.loading import load_states


def count_visit(similarities: np.ndarray, visits: np.ndarray, *, threshold: float) -> tuple[int | None, int]:
    """Whether a state is new, and how many visits its neighbourhood has had, this one included.

    The paper (arXiv 2602.23008) calls n "the number of similar past states" and stores a state only if it is
    similar to none. Read literally, n would stay 1 on every return to the same state; so each stored state
    stands for all the visits near it, and n is their sum: 1, 2, 3, ... for a state visited again and again.

    Args:
        similarities: cosine of each stored state with the visited one, [n].
        visits: visits counted so far for each stored state, [n].
        threshold: a state is similar if its cosine is strictly above this.

    Returns:
        (row, count): the most similar stored state, whose visits the caller raises by one, or None if the
        visited state is new; and the count n >= 1.
    """
    similar = similarities > threshold
    if not similar.any():
        return None, 1
    return int(similarities.argmax()), int(visits[similar].sum()) + 1


class VisitedStates:
    """The visited states of all scopes: the table `states` of a memory file, with an index in RAM.

    Keys are unit keys [dimension]; `MemoryStore` says the rest.
    """

    def __init__(self, db: sqlite3.Connection, dimension: int):
        self._db = db
        self._dimension = dimension
        self._indices: dict[str, ColumnTable] = {}

    def visit(self, scope: str, state: str, key: np.ndarray, *, threshold: float) -> int:
        index = self._index(scope)
        row, count = count_visit(cosine_similarities(index["key"], key), index["visits"], threshold=threshold)
        self._count(scope, state, key, row, 1)
        return count

    def add(self, scope: str, state: str, key: np.ndarray, visits: int) -> None:
        index = self._index(scope)
        for row in np.flatnonzero(index["text"] == hash(state)).tolist():
            query = "SELECT 1 FROM states WHERE id = ? AND state = ?"
            if self._db.execute(query, (int(index["id"][row]), state)).fetchone():
                return self._count(scope, state, key, row, visits)
        return self._count(scope, state, key, None, visits)

    def forget(self) -> None:
        """Read the file anew at the next call."""
        self._indices.clear()

    def _count(self, scope: str, state: str, key: np.ndarray, row: int | None, visits: int) -> None:
        """Add visits to a row of the scope's index, or a new state where that is None."""
        index = self._index(scope)
        if row is None:
            with self._db:
                state_id = self._db.execute(
                    "INSERT INTO states (scope, state, key, visits) VALUES (?, ?, ?, ?) RETURNING id",
                    (scope, state, key.tobytes(), visits),
                ).fetchone()[0]
            index.append(1, id=state_id, key=key, visits=visits, text=hash(state))
        else:
            with self._db:
                self._db.execute("UPDATE states SET visits = visits + ? WHERE id = ?", (visits, int(index["id"][row])))
            index["visits"][row] += visits

    def _index(self, scope: str) -> ColumnTable:
        if scope not in self._indices:
            self._indices[scope] = load_states(self._db, scope, self._dimension)
        return self._indices[scope]
