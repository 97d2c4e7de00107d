"""EMPO² memory: tips found by state, states counted for novelty, embeddings in batches.

Knows neither the recipe nor agent-lightning nor verl; importing it loads no torch.
"""

from empo2.memory.batching import BatchingEmbedder
from empo2.memory.embedder import Embedder, EmbedderError, SentenceEmbedder, embedder_name
from empo2.memory.file import MemoryFileError, copy_memory
from empo2.memory.novelty import Visit
from empo2.memory.retrieval import AtRandom, ByScore, BySimilarity, Policy
from empo2.memory.service import MemoryService
from empo2.memory.store import MAX_TIP_CHARACTERS, MemoryStore, NewPlay, Step, Tip

__all__ = [
    "MAX_TIP_CHARACTERS",
    "AtRandom",
    "BatchingEmbedder",
    "ByScore",
    "BySimilarity",
    "Embedder",
    "EmbedderError",
    "MemoryFileError",
    "MemoryService",
    "MemoryStore",
    "NewPlay",
    "Policy",
    "SentenceEmbedder",
    "Step",
    "Tip",
    "Visit",
    "copy_memory",
    "embedder_name",
]
