"""The toy world of simulation.py: houses as ways of junctions, notes of episodes, and policies of two layers.

All seeds are one tensor's first dimension.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache

import torch

DOORS, CODE, HIDDEN = 3, 24, 32
INPUTS = CODE + 3 * DOORS  # junction, doors tried, doors that a note recommends, doors that a note says lead nowhere
MISREAD = 0.1  # share of doors at which the start is taught to ignore what it knows
TRIALS, FRESH = 16, 8  # of adaptation: episodes in a house, and houses of a seed


class Net:
    """The policies of all seeds, as one: logits = V tanh(U x + b) + c."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]

    @classmethod
    def fresh(cls, seeds: int, generator: torch.Generator) -> "Net":
        def drawn(*shape: int, scale: float) -> torch.Tensor:
            return torch.randn(seeds, *shape, generator=generator) * scale

        first, second = drawn(INPUTS, HIDDEN, scale=INPUTS**-0.5), drawn(HIDDEN, DOORS, scale=HIDDEN**-0.5)
        return cls([first, torch.zeros(seeds, 1, HIDDEN), second, torch.zeros(seeds, 1, DOORS)])

    def log_probs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return log π of each door; inputs [seeds, ..., INPUTS]."""
        u, b, v, c = self.tensors
        flat = inputs.flatten(1, -2)
        logits = torch.baddbmm(c, torch.tanh(torch.baddbmm(b, flat, u)), v)
        return logits.log_softmax(-1).view(*inputs.shape[:-1], DOORS)


def one_hot(doors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(doors, DOORS).float()


@cache
def reader(seeds: int, updates: int = 400) -> Net:
    """Return policies that read notes, always the same: taught on random junctions, of no house."""
    generator = torch.Generator().manual_seed(1)
    net = Net.fresh(seeds, generator)
    optimizer = torch.optim.Adam(net.tensors, lr=0.01)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - update / updates)
        shape = (seeds, 64)
        code = torch.randn(*shape, CODE, generator=generator)
        best = torch.randint(DOORS, shape, generator=generator)
        # At least one door is neither tried nor known to lead nowhere: the best one.
        tried, dead = ((torch.rand(*shape, DOORS, generator=generator) < 0.3) * (1 - one_hot(best)) for _ in range(2))
        kind = torch.rand(*shape, 1, generator=generator)
        good = one_hot(best) * (kind < 0.3)
        dead, tried = dead * (kind < 0.6), tried * (torch.rand(*shape, 1, generator=generator) < 0.5)
        free = (1 - tried) * (1 - dead)
        known = torch.where(good.sum(-1, keepdim=True) > 0, good, free / free.sum(-1, keepdim=True))
        ignorant = (1 - tried) / (1 - tried).sum(-1, keepdim=True)
        target = (1 - MISREAD) * known + MISREAD * ignorant
        loss = -(target * net.log_probs(torch.cat([code, tried, good, dead], -1))).sum(-1).mean() * seeds
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Net(net.tensors)


class Houses:
    """The houses of all seeds, and what is known of them: [seeds, houses, junctions, ...]."""

    _KNOWN = ("good", "dead", "visits", "found")

    def __init__(self, seeds: int, houses: int, depth: int, generator: torch.Generator) -> None:
        shape = (seeds, houses, depth)
        self.depth = depth
        self.code = torch.randn(*shape, CODE, generator=generator)
        self.right = torch.randint(DOORS, shape, generator=generator)
        self.good, self.dead = torch.zeros(*shape, DOORS), torch.zeros(*shape, DOORS)
        self.visits = torch.zeros(seeds, houses, depth * (1 + DOORS) + 1)  # junctions, dead ends, the coin's room
        self.found = torch.zeros(seeds, houses, dtype=torch.bool)

    def chosen(self, places: Sequence[int]) -> "Houses":
        """Return some of the houses, as a copy."""
        made = copy(self)
        for name in (*self._KNOWN, "code", "right"):
            setattr(made, name, getattr(self, name)[:, places])
        return made

    def learn(self, places: Sequence[int], houses: "Houses") -> None:
        """Take over what became known of these houses."""
        for name in self._KNOWN:
            getattr(self, name)[:, places] = getattr(houses, name)

    def inputs(self, at: torch.Tensor, tried: torch.Tensor, noted: torch.Tensor) -> torch.Tensor:
        """Return what the policy reads; at, noted: [seeds, houses, players]."""

        def here(of: torch.Tensor) -> torch.Tensor:
            return of.gather(2, at.clamp_max(self.depth - 1).unsqueeze(-1).expand(*at.shape, of.shape[-1]))

        shown = noted.unsqueeze(-1)
        return torch.cat([here(self.code), tried, here(self.good) * shown, here(self.dead) * shown], -1)

    def solved(self, net: Net, noted: bool) -> torch.Tensor:
        """Return the probability that an episode finds the coin, exactly, [seeds, houses]: no move is to spare."""
        at = torch.arange(self.depth).expand(self.right.shape)
        inputs = self.inputs(at, torch.zeros(*at.shape, DOORS), torch.full(at.shape, noted))
        with torch.no_grad():
            chosen = net.log_probs(inputs).gather(-1, self.right.unsqueeze(-1))
        return chosen.squeeze(-1).sum(-1).exp()


@dataclass
class Played:
    """Episodes of one step, [seeds, houses, players, decisions]; the policy's inputs with and without notes."""

    at: torch.Tensor
    as_sent: torch.Tensor
    tip_free: torch.Tensor
    doors: torch.Tensor
    mask: torch.Tensor
    old: torch.Tensor  # log π_old of every door, as sent
    success: torch.Tensor  # [seeds, houses, players]
    intrinsic: torch.Tensor

    def chosen(self, log_probs: torch.Tensor) -> torch.Tensor:
        return log_probs.gather(-1, self.doors.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def play(
    net: Net,
    start: Net,
    houses: Houses,
    noted: torch.Tensor,
    by_start: torch.Tensor,
    distinct: bool,
    generator: torch.Generator,
) -> Played:
    """Play one episode each; note who comes where (`visits`). noted, by_start: [seeds, houses, players], bool."""
    depth, shape = houses.depth, noted.shape
    at, moves = torch.zeros(shape, dtype=torch.long), torch.full(shape, depth)
    tried, intrinsic = torch.zeros(*shape, DOORS), torch.zeros(shape)
    seen = torch.zeros(*shape, houses.visits.shape[-1], dtype=torch.bool)
    record: list[tuple[torch.Tensor, ...]] = []

    def visit(place: torch.Tensor, there: torch.Tensor) -> None:
        for player in range(shape[-1]):  # one after the other: the first one's 1/n is 1
            where = place[..., player].unsqueeze(-1)
            counts = there[..., player].unsqueeze(-1)
            if distinct:
                counts = counts & ~seen[..., player, :].gather(-1, where)
                seen[..., player, :].scatter_(-1, where, seen[..., player, :].gather(-1, where) | counts)
            houses.visits.scatter_add_(-1, where, counts.float())
            intrinsic[..., player] += (counts / houses.visits.gather(-1, where).clamp_min(1)).squeeze(-1)

    for _ in range(depth):
        active = (moves > 0) & (at < depth)
        as_sent = houses.inputs(at, tried, noted)
        tip_free = houses.inputs(at, tried, torch.zeros_like(noted))
        log_probs = torch.where(by_start.unsqueeze(-1), start.log_probs(as_sent), net.log_probs(as_sent))
        doors = torch.multinomial(log_probs.exp().flatten(0, -2), 1, generator=generator).view(shape)
        record.append((at, as_sent, tip_free, doors, active, log_probs))
        visit(at, active)
        right = houses.right.gather(2, at.clamp_max(depth - 1)) == doors
        wrong = active & ~right
        visit(depth + at.clamp_max(depth - 1) * DOORS + doors, wrong)
        tried = torch.where((active & right).unsqueeze(-1), 0.0, tried + one_hot(doors) * wrong.unsqueeze(-1))
        at, moves = at + (active & right), moves - active.long() - wrong.long()
    success = at == depth
    visit(torch.full(shape, depth * (1 + DOORS)), success)
    columns = [torch.stack(column, 3) for column in zip(*record, strict=True)]
    return Played(*columns, success=success, intrinsic=intrinsic)


def remember(houses: Houses, played: Played, false: float, generator: torch.Generator) -> None:
    """Add a note of each episode: the way of a success, or the way to the last wrong door, and that door.

    A share of failures, ``false``, names any door there instead. Where all doors are said to lead nowhere, the newest
    note alone is read.
    """
    junctions = torch.arange(houses.depth)
    for player in range(played.success.shape[-1]):
        at, doors = played.at[:, :, player].clamp_max(houses.depth - 1), played.doors[:, :, player]
        won = played.success[:, :, player].unsqueeze(-1)
        wrong = played.mask[:, :, player] & (houses.right.gather(2, at) != doors)
        last = torch.where(wrong, at, -1).amax(-1, keepdim=True)
        door = doors.gather(2, (wrong * junctions).argmax(-1, keepdim=True))  # decisions are as many as junctions
        if false:
            lies = torch.rand(door.shape, generator=generator) < false
            door = torch.where(lies, torch.randint(DOORS, door.shape, generator=generator), door)
        reached = torch.where(won, houses.depth, last)
        houses.good = torch.maximum(houses.good, one_hot(houses.right) * (junctions < reached).unsqueeze(-1))
        failed = (junctions == last) & ~won
        newest = one_hot(door.expand_as(failed)) * failed.unsqueeze(-1)
        dead = torch.maximum(houses.dead, newest)
        houses.dead = torch.where(dead.all(-1, keepdim=True), newest, dead)
    houses.found |= played.success.any(-1)
