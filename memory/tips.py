"""The values that are stored in the memory (steps) and found in it (tips)."""

from dataclasses import dataclass

import numpy as np

MAX_TIP_CHARACTERS = 12_000  # stored; a thousand words of twelve characters


@dataclass(frozen=True)
class Step:
    """One step of an episode: the state met, its embedding [dimension], and the action taken there."""

    state: str
    key: np.ndarray
    action: str


@dataclass(frozen=True)
class Tip:
    """A tip found for a state. `action` is the action of its episode in the stored state most similar to that one."""

    id: int
    episode: str
    text: str
    action: str
    score: float
    success: bool | None
    value: float
    similarity: float
