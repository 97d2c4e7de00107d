"""Build the memory and its retrieval policy from the settings."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from empo2.memory import (
    AtRandom,
    BatchingEmbedder,
    ByScore,
    BySimilarity,
    Embedder,
    EmbedderError,
    MemoryService,
    Policy,
    SentenceEmbedder,
)
from empo2.recipe import baselines
from empo2.recipe.config import Settings
from empo2.recipe.gateway.told_apart import Watched


def open_memory(settings: Settings, file: Path, embedder: Embedder | None = None) -> MemoryService:
    """Load the embedder, and open, check and lock the run's memory; plain GRPO has neither.

    Args:
        file: the memory file, created if absent.
        embedder: by default that of ``memory.embedder``, which takes seconds to load.

    Raises:
        EmbedderError: the embedder does not load.
        MemoryFileError: the file cannot be used.
    """
    memory = settings.memory
    if settings.algorithm.name == "grpo":
        file = Path(":memory:")
        embedder = _NoEmbedder() if settings.critic.path is None else embedder
    paper = baselines.asked_for(settings, "algorithm.novelty")
    service = partial(paper.DistilledMemory, seed=settings.algorithm.seed) if paper else MemoryService
    watched = Watched(embedder or SentenceEmbedder(memory.embedder, device=memory.embedder_device))
    return service(
        file,
        BatchingEmbedder(watched, memory.embedder_threads, accelerated=memory.accelerated),
        retrieval_policy(settings),
        capacity=memory.capacity,
        novelty_similarity=settings.algorithm.novelty_similarity,
        value_learning_rate=memory.value_learning_rate,
    )


class _NoEmbedder:
    """Stands where the memory is off: loading a real one takes seconds and 0.5 GB."""

    name, dimension = "none", 1

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        raise EmbedderError("algorithm.name=grpo has no memory")


def retrieval_policy(settings: Settings) -> Policy:
    """Return the policy that ``memory.retrieval`` names; its draws are seeded by ``algorithm.seed``."""
    if paper := baselines.asked_for(settings, "memory.retrieval"):
        return paper.policy(settings)
    memory = settings.memory
    if memory.retrieval == "random":
        return AtRandom(memory.top_k, np.random.default_rng(settings.algorithm.seed))
    return (ByScore if memory.retrieval == "score" else BySimilarity)(memory.top_k, memory.min_similarity)
