"""Random network distillation (Burda et al. 2018, arXiv 1810.12894): novelty as the error of a trained network.

A predictor learns to give the outputs of a fixed random network for the states that were visited. Where it errs, few
states like this one were visited.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

_HIDDEN, _OUTPUTS = 128, 64  # units; two layers for a sentence's embedding, convolutions in the paper [ours]
_CLIP = 5.0  # of normalized inputs
_DISCOUNT = 0.99  # of the intrinsic returns whose deviation scales the reward
_EPOCHS, _BATCH = 4, 32  # passes over a step's visits, visits per Adam step; the paper: 4, a quarter of its 16,384
_RATE = 1e-3  # of Adam; the paper: 1e-4, with 30 times as many batches in a run [ours]
_BETAS, _EPSILON = (0.9, 0.999), 1e-8

type Arrays = dict[str, np.ndarray]


@dataclass
class Moments:
    """Running mean and variance of rows, merged batch by batch (Chan et al. 1979)."""

    count: float
    mean: np.ndarray
    squares: np.ndarray  # summed squares of the differences from the mean

    def add(self, rows: np.ndarray) -> None:
        """Add rows [n, ...]."""
        count, mean = len(rows), rows.mean(axis=0, dtype=np.float64)
        between = (mean - self.mean) ** 2 * self.count * count / (self.count + count)
        self.squares = self.squares + ((rows - mean) ** 2).sum(axis=0) + between
        self.mean = self.mean + (mean - self.mean) * count / (self.count + count)
        self.count += count

    @property
    def deviation(self) -> np.ndarray:
        return np.sqrt(self.squares / max(self.count, 1))


class RandomNetworkDistillation:
    """A fixed random network and its predictor; equal seeds and updates give equal rewards.

    Args:
        dimension: of the keys.
        seed: of both networks and of the order in which visits are learned.
    """

    def __init__(self, dimension: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._seed = seed
        self._updates = self._adam_steps = 0
        self._target, self._predictor = (_network(dimension, generator) for _ in range(2))
        self._first = {name: np.zeros_like(weights) for name, weights in self._predictor.items()}  # Adam's moments
        self._second = {name: np.zeros_like(weights) for name, weights in self._predictor.items()}
        self._inputs = Moments(0, np.zeros(dimension), np.zeros(dimension))
        self._returns = Moments(0, np.zeros(()), np.zeros(()))

    def reward(self, key: np.ndarray) -> float:
        """Return the intrinsic reward of a state, as of the last update.

        It is the predictor's error divided by the running deviation of the intrinsic returns. Before the first update
        it is 0: these visits set the normalization, as those of the paper's random agent do.
        """
        deviation = float(self._returns.deviation)
        return float(self._errors(key[None])[0]) / deviation if deviation else 0.0

    def update(self, episodes: Sequence[np.ndarray]) -> None:
        """Learn the visits of a step.

        Args:
            episodes: keys [visits, dimension] of each episode, in its order.
        """
        keys, first = np.concatenate(episodes), not self._updates
        if not first:
            self._add_returns(episodes)  # of the errors that were rewarded
        self._inputs.add(keys)
        self._learn(keys)
        if first:  # nothing was rewarded, and an untrained network's errors would outweigh all later ones
            self._add_returns(episodes)

    def _add_returns(self, episodes: Sequence[np.ndarray]) -> None:
        self._returns.add(np.concatenate([_discounted(self._errors(episode)) for episode in episodes]))

    def _learn(self, keys: np.ndarray) -> None:
        generator = np.random.default_rng((self._seed, self._updates))
        self._updates += 1
        inputs = self._normalized(keys)
        targets = _forward(self._target, inputs)[-1]
        for _ in range(_EPOCHS):
            order = generator.permutation(len(keys))
            for start in range(0, len(order), _BATCH):
                rows = order[start : start + _BATCH]
                self._adam_step(_gradients(self._predictor, inputs[rows], targets[rows]))

    def dump(self) -> bytes:
        """Return everything, for `load`."""
        file = io.BytesIO()
        numbers = np.array([self._seed, self._updates, self._adam_steps])
        networks = (self._target, self._predictor, self._first, self._second)
        weights = {f"{place}{name}": array for place, arrays in enumerate(networks) for name, array in arrays.items()}
        moments = {
            f"{name}_{field}": value
            for name, each in (("inputs", self._inputs), ("returns", self._returns))
            for field, value in vars(each).items()
        }
        np.savez(file, numbers=numbers, **weights, **moments)
        return file.getvalue()

    @classmethod
    def load(cls, content: bytes) -> Self:
        """Return what `dump` has written."""
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            seed, updates, adam_steps = arrays["numbers"].tolist()
            loaded = cls(len(arrays["inputs_mean"]), seed)
            loaded._updates, loaded._adam_steps = updates, adam_steps
            for place, network in enumerate((loaded._target, loaded._predictor, loaded._first, loaded._second)):
                network.update({name: arrays[f"{place}{name}"] for name in network})
            for name, each in (("inputs", loaded._inputs), ("returns", loaded._returns)):
                vars(each).update({field: arrays[f"{name}_{field}"] for field in vars(each)})
        return loaded

    def _normalized(self, keys: np.ndarray) -> np.ndarray:
        scaled = (keys - self._inputs.mean) / (self._inputs.deviation + _EPSILON)
        return np.clip(scaled, -_CLIP, _CLIP).astype(np.float32)

    def _errors(self, keys: np.ndarray) -> np.ndarray:
        """Return the mean squared difference of the networks' outputs, [n]."""
        inputs = self._normalized(keys)
        return ((_forward(self._predictor, inputs)[-1] - _forward(self._target, inputs)[-1]) ** 2).mean(axis=1)

    def _adam_step(self, gradients: Arrays) -> None:
        self._adam_steps += 1
        corrections = [1 - beta**self._adam_steps for beta in _BETAS]
        for name, gradient in gradients.items():
            first, second = self._first[name], self._second[name]
            first += (1 - _BETAS[0]) * (gradient - first)
            second += (1 - _BETAS[1]) * (gradient**2 - second)
            step = first / corrections[0] / (np.sqrt(second / corrections[1]) + _EPSILON)
            self._predictor[name] -= np.float32(_RATE) * step


def _network(dimension: int, generator: np.random.Generator) -> Arrays:
    """Return the weights of two layers: orthogonal with gain sqrt(2), biases 0."""

    def orthogonal(rows: int, columns: int) -> np.ndarray:
        square, _ = np.linalg.qr(generator.standard_normal((max(rows, columns),) * 2))
        return (np.sqrt(2) * square[:rows, :columns]).astype(np.float32)

    return {
        "in": orthogonal(dimension, _HIDDEN),
        "in_bias": np.zeros(_HIDDEN, np.float32),
        "out": orthogonal(_HIDDEN, _OUTPUTS),
        "out_bias": np.zeros(_OUTPUTS, np.float32),
    }


def _forward(network: Arrays, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden units [n, hidden] after ReLU and the outputs [n, outputs]."""
    hidden = np.maximum(inputs @ network["in"] + network["in_bias"], 0)
    return hidden, hidden @ network["out"] + network["out_bias"]


def _gradients(network: Arrays, inputs: np.ndarray, targets: np.ndarray) -> Arrays:
    """Return the gradient of the mean squared difference from the targets."""
    hidden, outputs = _forward(network, inputs)
    outer = 2 * (outputs - targets) / outputs.size
    inner = outer @ network["out"].T * (hidden > 0)
    return {
        "in": inputs.T @ inner,
        "in_bias": inner.sum(axis=0),
        "out": hidden.T @ outer,
        "out_bias": outer.sum(axis=0),
    }


def _discounted(errors: np.ndarray) -> np.ndarray:
    """Return the running sums R_t = 0.99 R_(t-1) + e_t, by which the paper's code normalizes."""
    sums, total = np.empty(len(errors)), 0.0
    for index, error in enumerate(errors):
        sums[index] = total = _DISCOUNT * total + float(error)
    return sums
