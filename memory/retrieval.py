"""Retrieval policies: functions from arrays of stored entries to the row indices of the chosen ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np


@dataclass(frozen=True)
class Entries:
    """The entries that a policy ranks, as arrays [n], oldest entry first."""

    similarities: np.ndarray  # cosine of each entry's key with the query
    scores: np.ndarray  # score of the entry's episode
    values: np.ndarray  # learned value Q of the entry's tip
    # A number per entry, equal for equal tip texts. All entries of an episode share one tip, so "each text once"
    # implies "each episode once".
    texts: np.ndarray


type Policy = Callable[[Entries], np.ndarray]
"""Chooses tips: returns row indices, best first, each text once."""


@dataclass(frozen=True)
class Ranked:
    """The entries that are similar enough, ordered by columns of `Entries`, all descending, then newest first.

    Each text counts once, by its first entry in this order.
    """

    order: Sequence[str]  # names of the columns
    k: int  # most rows to return
    min_similarity: float  # entries need a cosine strictly above it

    def __call__(self, entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities > self.min_similarity)
        return first_of_texts(similar, [getattr(entries, column) for column in self.order], entries.texts, self.k)


# EMPO²'s retrieval (arXiv 2602.23008), best score first. The paper leaves ties open. Without the value, equal scores
# favor errors: a true tip that is written again is a duplicate and stays old, while each slip of the pen is a new text,
# and comes first (docs/learning.md).
ByScore = partial(Ranked, ("scores", "similarities", "values"))
BySimilarity = partial(Ranked, ("similarities", "scores"))


@dataclass(frozen=True)
class AtRandom:
    """Any tips of the scope, whatever their similarity: a control, which tells what choosing tips is worth."""

    k: int  # most rows to return
    generator: np.random.Generator  # random generator of the draws; each text is drawn with the same probability

    def __call__(self, entries: Entries) -> np.ndarray:
        _, rows = np.unique(entries.texts, return_index=True)
        return self.generator.choice(rows, min(self.k, len(rows)), replace=False)


def first_of_texts(rows: np.ndarray, keys: Sequence[np.ndarray], texts: np.ndarray, k: int) -> np.ndarray:
    """Return the first k of `rows` (ascending), ordered by the keys, then by row, all descending, each text once.

    Sorts only a few rows, since 100,000 would take 17 ms, and more if these hold too few texts.
    """
    size = 32 * max(k, 1)
    while True:
        head = _head(rows, keys, size)
        _, first = np.unique(texts[head], return_index=True)
        if len(first) >= k or len(head) == len(rows):
            return head[np.sort(first)[:k]]
        size *= 8


def _head(rows: np.ndarray, keys: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return the first `size` of `rows` in the order of `first_of_texts`."""
    inside, tied = [], rows  # the keys so far do not decide about `tied`
    for key in keys:
        if len(tied) <= size:
            break
        values = key[tied]
        border = np.partition(values, -size)[-size]
        inside.append(tied[values > border])
        tied = tied[values == border]
        size -= len(inside[-1])
    head = np.concatenate([*inside, tied[-size:]])
    return head[np.lexsort((head, *(key[head] for key in reversed(keys))))[::-1]]
