"""Build the memory and its retrieval policy from the settings."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from empo2.memory import (
    AtRandom,
    ByAge,
    ByScore,
    BySimilarity,
    ByValue,
    Embedder,
    MemoryService,
    Policy,
    SentenceEmbedder,
)
from empo2.recipe.config import Settings


def open_memory(settings: Settings, file: Path, embedder: Callable[[], Embedder] | None = None) -> MemoryService:
    """Return the run's memory; model and file are opened at first use.

    Args:
        file: the memory file, created if absent.
        embedder: makes the embedder; by default that of ``memory.embedder``.
    """
    memory = settings.memory
    return MemoryService(
        file,
        embedder or partial(SentenceEmbedder, memory.embedder, device=memory.embedder_device),
        retrieval_policy(settings),
        capacity=memory.capacity,
        novelty_similarity=settings.algorithm.novelty_similarity,
        value_learning_rate=memory.value_learning_rate,
        embedder_threads=memory.embedder_threads,
    )


def retrieval_policy(settings: Settings) -> Policy:
    """Return the policy that ``memory.retrieval`` names; its draws are seeded by ``algorithm.seed``."""
    memory, generator = settings.memory, np.random.default_rng(settings.algorithm.seed)
    match memory.retrieval:
        case "score":
            return ByScore(memory.top_k, memory.min_similarity)
        case "similarity":
            return BySimilarity(memory.top_k, memory.min_similarity)
        case "newest":
            return ByAge(memory.top_k, memory.min_similarity)
        case "random":
            return AtRandom(memory.top_k, generator)
        case "value":
            return ByValue(
                memory.top_k,
                memory.min_similarity,
                candidates=memory.candidates,
                weight=memory.value_weight,
                exploration=memory.exploration,
                generator=generator,
            )
