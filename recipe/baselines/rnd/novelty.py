"""Reward states that a network has not yet learned to map as a fixed random one does."""

from pathlib import Path
from typing import Any

import numpy as np

from empo2.memory import MemoryService

_HIDDEN, _OUTPUTS = 128, 32
_RATE = 0.1  # of gradient descent [ours: visits to one state earn 1, 0.61, 0.41, 0.29, where 1/n is 1, 0.5, 0.33, 0.25]

type Layers = tuple[np.ndarray, np.ndarray]
"""Weights of a network with one hidden layer of ReLU and no biases, [dimension, hidden] and [hidden, outputs]."""


class RandomNetwork:
    """A fixed random network, and a predictor of its outputs, which learns from visited states.

    A state's novelty is the predictor's squared error, divided by that before it had learned anything: 1 for a first
    visit, and falling, as 1/n does. The paper divides by a running standard deviation instead, which starts anywhere
    [ours]. What is learned of one state holds for those that resemble it: after a step of 3,840 turns, states of
    ScienceWorld that nobody has seen have 0.19, where 1/n is 1, so that ``algorithm.return_tolerance``, half of a new
    state's reward, would hide most of them: lower it.

    Args:
        target, predictor: weights, drawn differently.
    """

    def __init__(self, target: Layers, predictor: Layers) -> None:
        self._target, self._first, self.predictor = target, predictor, predictor

    @classmethod
    def drawn(cls, dimension: int, seed: int) -> "RandomNetwork":
        """Return one whose weights are normal with variance 2 / hidden: unit vectors in, outputs of about 1."""
        generator, scale = np.random.default_rng(seed), (2 / _HIDDEN) ** 0.5

        def layers() -> Layers:
            inner, outer = (dimension, _HIDDEN), (_HIDDEN, _OUTPUTS)
            return scale * generator.standard_normal(inner), scale * generator.standard_normal(outer)

        return cls(layers(), layers())

    def novelty(self, key: np.ndarray) -> float:
        """Return the novelty of a state with this embedding, [dimension]: 0 to 1."""
        wanted = _outputs(self._target, key)
        now, first = (float(((_outputs(layers, key) - wanted) ** 2).sum()) for layers in (self.predictor, self._first))
        return min(1.0, now / first) if first else 0.0

    def learn(self, key: np.ndarray) -> None:
        """Take one step down the gradient of half the squared error at a visited state."""
        inner, outer = self.predictor
        hidden = np.maximum(key @ inner, 0)
        error = hidden @ outer - _outputs(self._target, key)
        back = (outer @ error) * (hidden > 0)
        self.predictor = inner - _RATE * np.outer(key, back), outer - _RATE * np.outer(hidden, error)


class DistilledMemory(MemoryService):
    """A memory whose novelty is `RandomNetwork`'s, one for all scopes.

    The visits of a step are learned when it is over, so that no episode's reward depends on how fast the others are.
    A memory ``x.sqlite``, and a snapshot, has the predictor beside it, ``x.npz``; one without it has the first one.
    """

    def __init__(self, file: Path, *args: Any, seed: int, **options: Any) -> None:
        super().__init__(file, *args, **options)
        self._file, self._seed = file, seed
        self._network = self._read(file)

    def novelty(self, embedding: np.ndarray, visits: int) -> float:
        return self._network.novelty(embedding)

    async def commit_visits(self) -> None:
        keys = [visit.key for own in self._visits.values() for visit in own]
        try:
            await super().commit_visits()
        finally:  # also where that takes too long
            if keys:
                for key in np.random.default_rng(self._seed).permutation(keys):
                    self._network.learn(key)
                self._write(self._file)

    async def snapshot(self, path: Path) -> None:
        await super().snapshot(path)
        self._write(path)

    async def restore(self, path: Path) -> None:
        await super().restore(path)
        self._network = self._read(path)
        self._write(self._file)

    def _write(self, memory: Path) -> None:
        inner, outer = self._network.predictor
        with (part := memory.with_suffix(".part")).open("wb") as file:
            np.savez(file, inner=inner, outer=outer)
        part.replace(memory.with_suffix(".npz"))

    def _read(self, memory: Path) -> RandomNetwork:
        network = RandomNetwork.drawn(self._dimension, self._seed)
        if (file := memory.with_suffix(".npz")).exists():
            with np.load(file) as stored:
                network.predictor = stored["inner"], stored["outer"]
        return network


def _outputs(layers: Layers, key: np.ndarray) -> np.ndarray:
    return np.maximum(key @ layers[0], 0) @ layers[1]
