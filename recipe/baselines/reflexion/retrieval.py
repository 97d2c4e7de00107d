"""The newest tips first, whatever came of their episodes, as Reflexion keeps its last reflections."""

from empo2.memory.retrieval import Ranked
from empo2.recipe.config import Settings


def policy(settings: Settings) -> Ranked:
    """Return the policy of ``memory.retrieval=newest``."""
    return Ranked((), settings.memory.top_k, settings.memory.min_similarity)
