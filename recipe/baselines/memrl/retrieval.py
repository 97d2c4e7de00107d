"""Retrieval in two phases: the most similar tips are candidates; the most useful of these are shown."""

import numpy as np

from empo2.memory.retrieval import Entries, Policy, first_of_texts
from empo2.recipe.config import Settings

_DIGITS = 5  # of a cosine; sums of float32 differ in the seventh


def policy(settings: Settings) -> Policy:
    """Return MemRL's retrieval, of ``memory.retrieval=value``; its draws are seeded by ``algorithm.seed``.

    Candidates have a cosine of at least ``min_similarity`` (δ), each text once, by its most similar entry (the newest
    of equals). They are all those of the ``candidates`` (k1) most similar states, as in the authors' code: of single
    tips, the newest would be the only ones of a task that is played again and again. Over them, rank =
    (1 - λ) z(similarity) + λ z(Q) with λ of ``value_weight``, z with the population's standard deviation and 0 where
    that is 0. Ties are broken by similarity, then newest first. The paper takes both z over the candidates, the
    authors' code z(similarity) by ``similarity_statistics``, a mean and a deviation fixed for their encoder and data.

    The best ``top_k`` (k2) are returned, or with the probability ``exploration`` as many random ones, best first too.
    """

    memory, generator = settings.memory, np.random.default_rng(settings.algorithm.seed)

    def by_value(entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities >= memory.min_similarity)
        rows = first_of_texts(similar, (entries.similarities,), entries.texts, len(similar))
        near = np.round(entries.similarities[rows], _DIGITS)  # equal for one state
        if len(states := np.unique(near)) > memory.candidates:
            rows = rows[near >= states[-memory.candidates]]
        similarities = entries.similarities[rows].astype(np.float64)
        if memory.similarity_statistics is None:
            similar_z = _z_scores(similarities)
        else:
            mean, deviation = memory.similarity_statistics
            similar_z = (similarities - mean) / deviation
        rank = (1 - memory.value_weight) * similar_z + memory.value_weight * _z_scores(entries.values[rows])
        ranked = rows[np.lexsort((rows, similarities, rank))[::-1]]
        if generator.random() < memory.exploration:
            drawn = generator.choice(len(ranked), min(memory.top_k, len(ranked)), replace=False)
            return ranked[np.sort(drawn)]
        return ranked[: memory.top_k]

    return by_value


def _z_scores(values: np.ndarray) -> np.ndarray:
    # Equal values have deviation 0, but not always in floating point.
    deviation = values.std() if len(values) and np.ptp(values) else 0.0
    return (values - values.mean()) / deviation if deviation else np.zeros(len(values))
