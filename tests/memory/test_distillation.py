"""Random network distillation: against torch, against plain sums, and behind the service."""

import io
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from empo2.memory import MemoryService, Novelty
from empo2.memory.distillation import RandomNetworkDistillation

from .test_service import serving

GENERATOR = np.random.default_rng(7)


def states(*shape: int) -> np.ndarray:
    drawn = GENERATOR.normal(size=(*shape, 6)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)


STEPS = [[states(3), states(5)], [states(4), states(2), states(1)]]  # episodes of two steps


def test_rewards_are_those_of_a_torch_version() -> None:
    """Two updates of at most 32 visits, so that each pass is one Adam step over all of them."""
    import torch

    ours = RandomNetworkDistillation(6, seed=3)
    with np.load(io.BytesIO(ours.dump())) as arrays:
        names = ("in", "in_bias", "out", "out_bias")
        target, predictor = ([torch.tensor(arrays[f"{place}{name}"]) for name in names] for place in range(2))
    for weights in predictor:
        weights.requires_grad_(True)
    adam = torch.optim.Adam(predictor, lr=1e-3)

    def errors(keys: np.ndarray, past: np.ndarray) -> torch.Tensor:
        x = torch.tensor(np.clip((keys - past.mean(axis=0)) / (past.std(axis=0) + 1e-8), -5, 5), dtype=torch.float32)
        layers = [torch.relu(x @ w1 + b1) @ w2 + b2 for w1, b1, w2, b2 in (target, predictor)]
        return ((layers[0] - layers[1]) ** 2).mean(dim=1)

    def add_returns(episodes: list[np.ndarray]) -> None:
        for episode in episodes:
            found = errors(episode, past).tolist()
            returns.extend(sum(0.99 ** (t - s) * found[s] for s in range(t + 1)) for t in range(len(found)))

    past, returns, probe = np.empty((0, 6)), [], states(4)
    for number, episodes in enumerate(STEPS):
        keys = np.concatenate(episodes)
        if number:
            add_returns(episodes)
        past = np.concatenate([past, keys])
        for _ in range(4):
            adam.zero_grad()
            errors(keys, past).mean().backward()
            adam.step()
        if not number:
            add_returns(episodes)
        ours.update(episodes)
        expected = errors(probe, past).detach().numpy() / np.std(returns)
        assert [ours.reward(key) for key in probe] == pytest.approx(expected, rel=1e-4)


def test_the_first_step_earns_nothing_and_known_states_ever_less() -> None:
    network = RandomNetworkDistillation(6, seed=0)
    known, new = states(30), states(30)
    assert network.reward(known[0]) == 0
    means = []
    for _ in range(12):
        network.update([known[:15], known[15:]])
        means.append([np.mean([network.reward(key) for key in keys]) for keys in (known, new)])
    (first, _), (last, unseen) = means[0], means[-1]
    assert last < first / 4
    assert unseen > 1.5 * last


def test_what_was_dumped_goes_on_as_if_it_had_not_been() -> None:
    one = RandomNetworkDistillation(6, seed=1)
    one.update(STEPS[0])
    other = RandomNetworkDistillation.load(one.dump())
    for network in (one, other):
        network.update(STEPS[1])
    assert one.reward(STEPS[0][0][0]) == other.reward(STEPS[0][0][0]) > 0
    fresh = RandomNetworkDistillation(6, seed=2)
    fresh.update(STEPS[0])
    fresh.update(STEPS[1])
    assert fresh.reward(STEPS[0][0][0]) != one.reward(STEPS[0][0][0])


async def visits(service: MemoryService, episode: str, *names: str) -> list[Novelty]:
    return [await service.visit("a", episode, name, await service.embed(name, urgent=False)) for name in names]


async def test_the_service_rewards_by_the_last_commit_in_any_order(tmp_path: Path) -> None:
    async with serving(tmp_path / "one.sqlite", 5) as one, serving(tmp_path / "other.sqlite", 5) as other:
        for service, episodes in ((one, "xy"), (other, "yx")):
            for episode in episodes:
                path = ("p:0", "p:90", "p:200") if episode == "x" else ("p:10", "p:140")
                assert [reward for _, reward in await visits(service, episode, *path)] == [0] * len(path)
            await service.commit_visits()
        found = await visits(one, "z", "p:0", "p:0", "p:300")
        assert found == await visits(other, "z", "p:0", "p:0", "p:300")
        assert [n for n, _ in found] == [3, 4, 1]  # counted as without it
        assert found[0][1] == found[1][1] > 0  # learned between steps, not within them


async def test_networks_are_part_of_snapshots(tmp_path: Path) -> None:
    file, snapshot = tmp_path / "memory.sqlite", tmp_path / "snapshot.sqlite"
    async with serving(file, 5) as service:
        await visits(service, "a", "p:0", "p:90", "p:200")
        await service.snapshot(snapshot)
        ((_, before),) = await visits(service, "b", "p:50")
        await service.commit_visits()
        ((_, after),) = await visits(service, "c", "p:50")
        assert after != before
        await service.restore(snapshot)
        assert (await visits(service, "d", "p:50"))[0][1] == before
    async with serving(snapshot, 6) as service:  # the file's networks, not new ones
        assert (await visits(service, "e", "p:50"))[0][1] == before


async def test_without_it_the_reward_is_that_of_the_count(tmp_path: Path) -> None:
    async with serving(tmp_path / "memory.sqlite") as service:
        assert await visits(service, "a", "p:0", "p:0", "p:180") == [(1, 1.0), (2, 0.5), (1, 1.0)]


async def test_files_and_snapshots_without_networks_can_be_used(tmp_path: Path) -> None:
    file, old = tmp_path / "memory.sqlite", tmp_path / "old.sqlite"
    for path in (file, old):
        async with serving(path) as service:
            await visits(service, "a", "p:0", "p:90")
    with closing(sqlite3.connect(old)) as db, db:
        db.execute("DROP TABLE networks")
    async with serving(file, 5) as service:
        await visits(service, "b", "p:0", "p:90")
        await service.commit_visits()
        assert (await visits(service, "c", "p:0"))[0][1] > 0
        await service.restore(old)
        assert await visits(service, "d", "p:0") == [(2, 0.0)]  # networks as at the beginning
    async with serving(old, 5) as service:
        assert await visits(service, "e", "p:0") == [(2, 0.0)]
