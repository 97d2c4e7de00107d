"""Warn where an embedder cannot tell states apart, such as one that reads English for a text in another language."""

from collections import deque
from collections.abc import Sequence

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
        self._embedder = embedder
        self._recent: deque[tuple[str, np.ndarray]] | None = deque(maxlen=_RECENT)  # None once it has warned

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """As `Embedder.embed`; several threads may call it."""
        keys = self._embedder.embed(texts)
        for text, key in zip(texts, keys, strict=True):
            if (recent := self._recent) is None:
                break
            if problem := _problem(self._embedder, text, key, list(recent)):
                self._recent = None
                log.warning(f"memory.embedder={self.name} {problem}: {_FIX}")
            else:
                recent.append((text, key))
        return keys

    @property
    def warned(self) -> bool:
        return self._recent is None


def trouble(embedder: Embedder, texts: Sequence[str]) -> str:
    """Return why an embedder cannot tell texts apart, in a sentence; "" if it can."""
    recent: list[tuple[str, np.ndarray]] = []
    for text, key in zip(texts, embedder.embed(texts), strict=True):
        if problem := _problem(embedder, text, key, recent):
            return f"memory.embedder={embedder.name} {problem}: {_FIX}"
        recent.append((text, key))
    return ""


def _problem(embedder: Embedder, text: str, key: np.ndarray, recent: Sequence[tuple[str, np.ndarray]]) -> str:
    if isinstance(embedder, SentenceEmbedder) and embedder.unknown(text) > 0.5:
        return "does not know most of the word pieces of a state"
    if not recent:
        return ""
    others = np.stack([each for _, each in recent])
    for place in np.flatnonzero(others @ key > _EQUAL):
        if _words(recent[place][0]) != _words(text):
            return "gives unequal states one key"
    return ""


def _words(text: str) -> list[str]:
    return text.casefold().split()
