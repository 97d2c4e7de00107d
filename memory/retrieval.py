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
        return _first_of_texts(similar, (entries.scores, entries.similarities, entries.values), entries.texts, self.k)


@dataclass(frozen=True)
class BySimilarity:
    """The most similar first; ties are broken by score, then newest first. Attributes as in `ByScore`."""

    k: int
    min_similarity: float

    def __call__(self, entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities > self.min_similarity)
        return _first_of_texts(similar, (entries.similarities, entries.scores), entries.texts, self.k)


@dataclass(frozen=True)
class ByAge:
    """The newest first, as Reflexion keeps its last reflections (arXiv 2303.11366). Attributes as in `ByScore`."""

    k: int
    min_similarity: float

    def __call__(self, entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities > self.min_similarity)
        return _first_of_texts(similar, (), entries.texts, self.k)


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


@dataclass(frozen=True)
class ByValue:
    """MemRL's two phases (arXiv 2601.03192): the most similar are candidates; the most useful of these are shown.

    Candidates have a cosine of at least `min_similarity`, each text once, by its most similar entry (the newest of
    equals). Over them, rank = (1 - weight) z(similarity) + weight z(Q), z with the population's standard deviation
    and 0 where that is 0. Ties are broken by similarity, then newest first. The paper takes both z over the
    candidates, the authors' code z(similarity) by a mean and a deviation fixed for their encoder and data.

    Attributes:
        k: most rows to return (MemRL's k2).
        min_similarity: lowest cosine of a candidate (δ).
        candidates: most candidates (k1).
        weight: weight of the learned value (λ): 0 is similarity alone, 1 the learned value alone.
        exploration: probability that the k are drawn at random from the candidates; they are returned best first too.
        generator: random generator of these draws.
        statistics: mean and deviation of cosines for z(similarity); None for those of the candidates.
    """

    k: int
    min_similarity: float
    candidates: int
    weight: float
    exploration: float
    generator: np.random.Generator
    statistics: tuple[float, float] | None = None

    def __call__(self, entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities >= self.min_similarity)
        rows = _first_of_texts(similar, (entries.similarities,), entries.texts, self.candidates)
        similarities = entries.similarities[rows].astype(np.float64)
        if self.statistics is None:
            similar_z = _z_scores(similarities)
        else:
            mean, deviation = self.statistics
            similar_z = (similarities - mean) / deviation
        rank = (1 - self.weight) * similar_z + self.weight * _z_scores(entries.values[rows])
        ranked = rows[np.lexsort((rows, similarities, rank))[::-1]]
        if self.generator.random() < self.exploration:
            drawn = self.generator.choice(len(ranked), min(self.k, len(ranked)), replace=False)
            return ranked[np.sort(drawn)]
        return ranked[: self.k]


def _z_scores(values: np.ndarray) -> np.ndarray:
    # Equal values have deviation 0, but not always in floating point.
    deviation = values.std() if len(values) and np.ptp(values) else 0.0
    return (values - values.mean()) / deviation if deviation else np.zeros(len(values))


def _first_of_texts(rows: np.ndarray, keys: Sequence[np.ndarray], texts: np.ndarray, k: int) -> np.ndarray:
    """Return the first k of `rows` (ascending), ordered by the keys, then by row, all descending, each text once.

    Sorts only a few rows, since 100,000 would take 40 ms, and more if these hold too few texts.
    """
    size = 32 * max(k, 1)
    while True:
        head = _head(rows, keys, size)
        _, first = np.unique(texts[head], return_index=True)
        if len(first) >= k or len(head) == len(rows):
            return head[np.sort(first)[:k]]
        size *= 8


def _head(rows: np.ndarray, keys: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return the first `size` of `rows` in the order of `_first_of_texts`."""
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
