"""How similar the first states of episodes are: MemRL's threshold δ and its scale of cosines, for any encoder."""

import sqlite3
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from empo2.memory.browse import embedder_of
from empo2.memory.file import MemoryFileError


class Similarities(NamedTuple):
    """The cosines of all pairs of different first states.

    Attributes:
        states: different ones, by their text.
        mean, deviation: of the cosines, over the whole population.
        threshold: cosine that the given share of the pairs exceeds.
    """

    states: int
    mean: float
    deviation: float
    threshold: float

    @property
    def pairs(self) -> int:
        return self.states * (self.states - 1) // 2


def first_state_similarities(db: sqlite3.Connection, scopes: Collection[str], share: float = 0.2) -> Similarities:
    """Return the similarities of the first states of the episodes that left tips in these scopes, taken as one.

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
    cosines = (matrix @ matrix.T)[np.triu_indices(len(matrix), 1)].astype(np.float64)
    return Similarities(len(keys), float(cosines.mean()), float(cosines.std()), float(np.quantile(cosines, 1 - share)))
