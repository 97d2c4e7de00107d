"""Retrieval in two phases: the most similar tips are candidates; the most useful of these are shown."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from empo2.memory.retrieval import Entries, first_of_texts
from empo2.recipe.config import Settings


@dataclass(frozen=True)
class ByValue:
    """MemRL's retrieval.

    Candidates have a cosine of at least `min_similarity`, each text once, by its most similar entry (the newest of
    equals). Over them, rank = (1 - weight) z(similarity) + weight z(Q), z with the population's standard deviation
    and 0 where that is 0. Ties are broken by similarity, then newest first. The paper takes both z over the
    candidates, the authors' code z(similarity) by a mean and a deviation fixed for their encoder and data.
    """

    k: int  # most rows to return (MemRL's k2)
    min_similarity: float  # lowest cosine of a candidate (δ)
    candidates: int  # most candidates (k1)
    weight: float  # weight of the learned value (λ): 0 is similarity alone, 1 the learned value alone
    # Probability that the k are drawn at random from the candidates; they are returned best first too.
    exploration: float
    generator: np.random.Generator  # random generator of these draws
    # Mean and deviation of cosines for z(similarity); None for those of the candidates.
    statistics: Sequence[float] | None = None

    def __call__(self, entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities >= self.min_similarity)
        rows = first_of_texts(similar, (entries.similarities,), entries.texts, self.candidates)
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


def policy(settings: Settings) -> ByValue:
    """Return the policy of ``memory.retrieval=value``; its draws are seeded by ``algorithm.seed``."""
    memory = settings.memory
    return ByValue(
        memory.top_k,
        memory.min_similarity,
        memory.candidates,
        memory.value_weight,
        memory.exploration,
        np.random.default_rng(settings.algorithm.seed),
        memory.similarity_statistics,
    )


def _z_scores(values: np.ndarray) -> np.ndarray:
    # Equal values have deviation 0, but not always in floating point.
    deviation = values.std() if len(values) and np.ptp(values) else 0.0
    return (values - values.mean()) / deviation if deviation else np.zeros(len(values))
