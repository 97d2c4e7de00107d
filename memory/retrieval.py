"""Retrieval policies: functions from arrays of stored entries to the row indices of the chosen ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Entries:
    """The entries that a policy ranks, as arrays [n], oldest entry first.

    Attributes:
        similarities: cosine of each entry's key with the query.
        scores: score of the entry's episode.
        values: learned value Q of the entry's tip.
        texts: a number per entry, equal for equal tip texts. All entries of an episode share one tip, so "each text
            once" implies "each episode once".
    """

    similarities: np.ndarray
    scores: np.ndarray
    values: np.ndarray
    texts: np.ndarray


class Policy(Protocol):
    """A function that chooses tips."""

    def __call__(self, entries: Entries) -> np.ndarray:
        """Return row indices, best first, each text once."""
        ...


@dataclass(frozen=True)
class ByScore:
    """EMPO²'s retrieval (arXiv 2602.23008): the entries that are similar enough, best score first.

    Ties, which the paper leaves open, are broken by similarity, then by learned value, then newest first. Each text
    counts once, by its first entry in this order.

    Without the value, equal scores favor errors: a true tip that is written again is a duplicate and stays old, while
    each slip of the pen is a new text, and comes first (docs/learning.md).

    Attributes:
        k: most rows to return.
        min_similarity: entries need a cosine strictly above it.
    """

    k: int
    min_similarity: float

    def __call__(self, entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities > self.min_similarity)
        return first_of_texts(similar, (entries.scores, entries.similarities, entries.values), entries.texts, self.k)


@dataclass(frozen=True)
class BySimilarity:
    """The most similar first; ties are broken by score, then newest first. Attributes as in `ByScore`."""

    k: int
    min_similarity: float

    def __call__(self, entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities > self.min_similarity)
        return first_of_texts(similar, (entries.similarities, entries.scores), entries.texts, self.k)


@dataclass(frozen=True)
class AtRandom:
    """Any tips of the scope, whatever their similarity: a control, which tells what choosing tips is worth.

    Attributes:
        k: most rows to return.
        generator: random generator of the draws; each text is drawn with the same probability.
    """

    k: int
    generator: np.random.Generator

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
