"""The newest tips first, whatever came of their episodes."""

from dataclasses import dataclass

import numpy as np

from empo2.memory.retrieval import Entries, first_of_texts
from empo2.recipe.config import Settings


@dataclass(frozen=True)
class ByAge:
    """The newest first, as Reflexion keeps its last reflections. Attributes as in `ByScore`."""

    k: int
    min_similarity: float

    def __call__(self, entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities > self.min_similarity)
        return first_of_texts(similar, (), entries.texts, self.k)


def policy(settings: Settings) -> ByAge:
    """Return the policy of ``memory.retrieval=newest``."""
    return ByAge(settings.memory.top_k, settings.memory.min_similarity)
