"""EMPO² memory: tips found by state, states counted for novelty, embeddings in batches.

Knows neither the recipe nor agent-lightning nor verl; importing it loads no torch.
"""

from empo2.memory.batching import BatchingEmbedder
from empo2.memory.embedder import Embedder, EmbedderError, SentenceEmbedder
from empo2.memory.file import MemoryFileError
from empo2.memory.store import MemoryStore, Step, Tip

__all__ = [
    "BatchingEmbedder",
    "Embedder",
    "EmbedderError",
    "MemoryFileError",
    "MemoryStore",
    "SentenceEmbedder",
    "Step",
    "Tip",
]
