"""Warn where an embedder cannot tell states apart, such as one that reads English for a text in another language."""

from collections import deque
from collections.abc import MutableSequence, Sequence

import numpy as np
import structlog

from empo2.memory import Embedder, SentenceEmbedder

log = structlog.get_logger()

_EQUAL = 0.9999  # cosine; equal word pieces have 1 but for the rounding of bfloat16
_RECENT = 256  # texts that a new one is compared with
_FIX = "novelty and retrieval take such states for one: choose another memory.embedder (docs/states.md)"


class Watched:
    """An embedder that warns, once, when it knows few of a text's word pieces, or gives unequal texts one key.

    Texts count as equal that differ in case and spaces alone.
    """

    def __init__(self, embedder: Embedder) -> None:
        self.name, self.dimension = embedder.name, embedder.dimension
        self.warned = False
        self._embedder = embedder
        self._recent: deque[tuple[str, np.ndarray]] = deque(maxlen=_RECENT)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """As `Embedder.embed`; several threads may call it."""
        keys = self._embedder.embed(texts)
        if not self.warned and (problem := _trouble(self._embedder, texts, keys, self._recent)):
            self.warned = True
            log.warning(problem)
        return keys


def trouble(embedder: Embedder, texts: Sequence[str]) -> str:
    """Return why an embedder cannot tell texts apart, in a sentence; "" if it can."""
    return _trouble(embedder, texts, embedder.embed(texts), [])


def _trouble(
    embedder: Embedder, texts: Sequence[str], keys: np.ndarray, recent: MutableSequence[tuple[str, np.ndarray]]
) -> str:
    """As `trouble`; texts are compared with those before them in ``recent``, and added to these."""
    for text, key in zip(texts, keys, strict=True):
        alike = [said for said, other in list(recent) if other @ key > _EQUAL]
        if isinstance(embedder, SentenceEmbedder) and embedder.unknown(text) > 0.5:
            return f"memory.embedder={embedder.name} does not know most of the word pieces of a state: {_FIX}"
        if any(_words(said) != _words(text) for said in alike):
            return f"memory.embedder={embedder.name} gives unequal states one key: {_FIX}"
        recent.append((text, key))
    return ""


def _words(text: str) -> list[str]:
    return text.casefold().split()
