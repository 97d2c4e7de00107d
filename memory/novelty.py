"""Count visits to similar states: the n of the intrinsic reward r = 1/n."""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter

import numpy as np

from empo2.memory.index import STATES, ColumnTable, cosine_similarities, load, near, unit

ADD_STATE = "INSERT INTO states (scope, state, key, visits) VALUES (?, ?, ?, ?) RETURNING id"
MAX_VISITS = 2**31 - 1  # of one state; the sum over a scope's states stays far below the 2**63 of SQLite and numpy


@dataclass(frozen=True)
class Visit:
    """One visit to a state: the state's text and its embedding [dimension]."""

    scope: str
    state: str
    key: np.ndarray


class VisitedStates:
    """The visited states of all scopes: the table `states` of a memory file, with an index in RAM.

    The paper (arXiv 2602.23008) calls n "the number of similar past states" and stores a state only if it is similar
    to none. Read literally, n would stay 1 on every return to the same state. Here each stored state counts all visits
    near it, and n is the sum of these counts: 1, 2, 3, ... for repeated visits to one state.

    A key is the embedding of a state, [dimension]; ValueError is raised for one that cannot be used, and nothing is
    stored then.
    """

    def __init__(self, db: sqlite3.Connection, dimension: int):
        self._db, self._dimension = db, dimension
        self._index = cache(lambda scope: load(db, STATES, scope, dimension))

    def count(self, visits: Sequence[Visit], *, threshold: float) -> list[int]:
        """Return of each visit the number of stored visits to states whose cosine with it is above the threshold."""
        keys, found = [unit(visit.key, self._dimension) for visit in visits], [0] * len(visits)
        for scope in {visit.scope for visit in visits}:
            places = [place for place, visit in enumerate(visits) if visit.scope == scope]
            index, wanted = self._index(scope), np.stack([keys[place] for place in places])
            for place, rows in zip(places, near(index["key"], wanted, threshold), strict=True):
                found[place] = int(index["visits"][rows].sum())
        return found

    def add_visits(self, visits: Sequence[Visit], *, threshold: float) -> None:
        """Store all visits or none; the result does not depend on their order.

        A visit is counted for the most similar stored state; a state similar to none is stored.

        Args:
            threshold: cosine above which two states count as similar.
        """
        keys = {(visit.scope, visit.state): unit(visit.key, self._dimension) for visit in visits}
        times = Counter((visit.scope, visit.state) for visit in visits)
        try:
            with self._db:
                # The choice of stored states must not depend on the order of the visits.
                for scope, of_scope in groupby(sorted(times), key=itemgetter(0)):
                    index, states = self._index(scope), [state for _, state in of_scope]
                    before, wanted = len(index), np.stack([keys[scope, state] for state in states])
                    for state, key, rows in zip(states, wanted, near(index["key"], wanted, threshold), strict=True):
                        # And those that are stored here, which are not copied.
                        near_and_new = index["key"][rows], index["key"][before:]
                        similarities = np.concatenate([cosine_similarities(each, key) for each in near_and_new])
                        if len(similarities) and similarities.max() > threshold:
                            row = np.append(rows, np.arange(before, len(index)))[similarities.argmax()]
                            self._revisit(index, int(row), times[scope, state])
                        else:
                            self._store(index, scope, state, key, times[scope, state])
        except BaseException:
            self.forget()  # the file has not changed
            raise

    def forget(self) -> None:
        """Discard the index in RAM; the next call reads the file again."""
        self._index.cache_clear()

    def _revisit(self, index: ColumnTable, row: int, visits: int) -> None:
        total = min(int(index["visits"][row]) + visits, MAX_VISITS)
        self._db.execute("UPDATE states SET visits = ? WHERE id = ?", (total, int(index["id"][row])))
        index["visits"][row] = total

    def _store(self, index: ColumnTable, scope: str, state: str, key: np.ndarray, visits: int) -> None:
        (state_id,) = self._db.execute(ADD_STATE, (scope, state, key.tobytes(), visits)).fetchone()
        index.append(1, id=state_id, key=key, visits=visits)
