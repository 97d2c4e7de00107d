"""Implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169) on stored episodes, as Retrospex trains its critic."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from empo2.recipe.baselines.retrospex.critic import Weights, outputs
from empo2.recipe.evaluation.turns import Episode

if TYPE_CHECKING:
    from torch import Generator, Tensor

EXPECTILE = 0.7  # τ of V's loss [retrospex]
DISCOUNT = 0.99  # of the next step's value [retrospex]
_TARGET_RATE = 0.005  # of the target networks, an exponential moving average [retrospex]
_RATE = 3e-4  # of Adam [IQL; retrospex: 1e-4, with ten times as many updates]
_BATCH, _HIDDEN = 128, 128  # transitions, units [retrospex]


@dataclass(frozen=True)
class Transitions:
    """Steps of episodes, those of an episode in order and side by side: the state after row i is that of row i + 1.

    Attributes:
        keys: embeddings of all texts, float32 [texts, dimension].
        tasks, states, actions: rows of ``keys``, [n].
        rewards: [n].
        last: True for the last step of an episode, [n].
    """

    keys: np.ndarray
    tasks: np.ndarray
    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.last)

    def situations(self, rows: np.ndarray) -> np.ndarray:
        """Return task and state side by side, [len(rows), 2 * dimension]."""
        return np.concatenate([self.keys[self.tasks[rows]], self.keys[self.states[rows]]], axis=1)


class Learned(NamedTuple):
    """The weights of the target Q networks and of V, of numpy."""

    q: Weights
    v: Weights

    def judge(self, transitions: Transitions) -> tuple[np.ndarray, np.ndarray]:
        """Return Q and Q - V of each row, [n] each."""
        rows = np.arange(len(transitions))
        situations = transitions.situations(rows)
        q = outputs(self.q, np.concatenate([situations, transitions.keys[transitions.actions]], axis=1)).min(axis=0)
        return q, q - outputs(self.v, situations)[0]


def transitions_of(
    episodes: Sequence[Episode], success_return: float, embed: Callable[[Sequence[str]], np.ndarray]
) -> Transitions:
    """Return the steps of episodes; the last one of each earns its return, in units of ``success_return``.

    Args:
        embed: from texts to embeddings, [texts, dimension]; it is given each text once.
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    texts = {text: row for row, text in enumerate(dict.fromkeys(text for turn in turns for text in turn))}
    tasks, states, actions = np.array([[texts[text] for text in turn] for turn in turns]).T
    ends = np.cumsum([len(episode.turns) for episode in episodes]) - 1
    rewards, last = np.zeros(len(turns), np.float32), np.zeros(len(turns), bool)
    rewards[ends] = [episode.return_ / success_return for episode in episodes]
    last[ends] = True
    return Transitions(embed(list(texts)), tasks, states, actions, rewards, last)


def expectile_loss(differences: "Tensor", expectile: float) -> "Tensor":
    """Return the mean of |τ - 1(u < 0)| u² (equation 5 of IQL); 0.5 is half the mean square."""
    weights = (expectile - (differences < 0).to(differences.dtype)).abs()
    return (weights * differences**2).mean()


def train(
    data: Transitions,
    updates: Iterable[int],
    *,
    seed: int,
    expectile: float = EXPECTILE,
    discount: float = DISCOUNT,
) -> Learned:
    """Return networks after a number of updates; equal data and seeds give equal networks.

    V(s) is the expectile of the target Q(s, a) over the actions in the data, and Q(s, a) learns r + discount * V(s').

    Args:
        updates: one item per update, such as a range or a progress bar over one.
    """
    import torch

    torch.set_num_threads(1)  # such small matrices are not faster on more, and much slower beside other processes
    generator = torch.Generator().manual_seed(seed)
    draws, dimension = np.random.default_rng(seed), data.keys.shape[1]
    q, v = _network(2, 3 * dimension, generator), _network(1, 2 * dimension, generator)
    target = {name: weight.detach().clone() for name, weight in q.items()}
    adam = torch.optim.Adam([*q.values(), *v.values()], lr=_RATE)
    for _ in updates:
        rows = draws.integers(len(data), size=_BATCH)
        situations = torch.from_numpy(data.situations(rows))
        inputs = torch.cat([situations, torch.from_numpy(data.keys[data.actions[rows]])], dim=1)
        going_on = torch.from_numpy(~data.last[rows])
        with torch.no_grad():
            wanted = outputs(target, inputs).min(dim=0).values
            following = torch.from_numpy(data.situations((rows + 1) % len(data)))
            goal = torch.from_numpy(data.rewards[rows]) + discount * going_on * outputs(v, following)[0]
        loss_v = expectile_loss(wanted - outputs(v, situations)[0], expectile)
        loss_q = ((outputs(q, inputs) - goal) ** 2).sum(dim=0).mean()
        adam.zero_grad()
        (loss_v + loss_q).backward()
        adam.step()
        with torch.no_grad():
            for name, weight in target.items():
                weight.lerp_(q[name], _TARGET_RATE)
    return Learned(*({name: weight.detach().numpy() for name, weight in each.items()} for each in (target, v)))


def _network(networks: int, inputs: int, generator: "Generator") -> Weights:
    """Return weights drawn uniformly from ±1 / sqrt(inputs of the layer), as torch's Linear has them."""
    import torch

    def drawn(*shape: int, fan_in: int) -> "Tensor":
        return ((2 * torch.rand(*shape, generator=generator) - 1) / fan_in**0.5).requires_grad_()

    return {
        "in": drawn(networks, inputs, _HIDDEN, fan_in=inputs),
        "in_bias": drawn(networks, 1, _HIDDEN, fan_in=inputs),
        "out": drawn(networks, _HIDDEN, 1, fan_in=_HIDDEN),
        "out_bias": drawn(networks, 1, fan_in=_HIDDEN),
    }
