"""The memory behind its asynchronous front: what an episode earns does not depend on the others' pace."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory import BatchingEmbedder, ByScore, MemoryService, Step

THRESHOLD = 0.7


class Compass:
    """Embeds "name:angle" as a direction, so that similarity is known and is not transitive."""

    name, dimension = "compass", 2

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([direction(text) for text in texts], np.float32)


def direction(text: str) -> list[float]:
    angle = float(text.partition(":")[2] or zlib.crc32(text.encode()) % 360)
    return [np.cos(np.radians(angle)), np.sin(np.radians(angle))]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[MemoryService]:
    options: dict[str, Any] = {"capacity": 100, "novelty_similarity": THRESHOLD, "value_learning_rate": 0.5}
    service = MemoryService(folder / "memory.sqlite", BatchingEmbedder(Compass()), ByScore(2, 0.5), **options)
    try:
        yield service
    finally:
        await service.close()


async def visit(service: MemoryService, episode: str, state: str, scope: str = "a") -> int:
    return await service.visit(scope, episode, state, await service.embed(state, urgent=False))


def alike(one: str, other: str) -> bool:
    return float(np.dot(direction(one), direction(other))) > THRESHOLD


TRAJECTORIES = st.lists(st.sampled_from(["x:0", "x:40", "x:80", "x:180", "x:182"]), min_size=1, max_size=6)


@given(trajectory=TRAJECTORIES, random=st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_identical_trajectories_earn_the_same_in_any_order(trajectory: list[str], random: Any) -> None:
    """Two steps of eight; the second sees all visits of the first."""

    async def steps() -> list[list[list[int]]]:
        order = [*range(8)] * len(trajectory)
        counts: list[list[list[int]]] = [[[] for _ in range(8)] for _ in range(2)]
        with TemporaryDirectory() as folder:
            async with serving(Path(folder)) as service:
                for step in (0, 1):
                    random.shuffle(order)
                    for episode in order:
                        own = counts[step][episode]
                        own.append(await visit(service, f"{step} {episode}", trajectory[len(own)]))
                    await service.commit_visits()
        return counts

    first, second = asyncio.run(steps())
    own = [sum(alike(state, before) for before in trajectory[: i + 1]) for i, state in enumerate(trajectory)]
    assert first == [own] * 8
    assert second == [second[0]] * 8
    if len({state[2:4] for state in trajectory}) == 1:  # all alike: every visit of the first step counts
        assert second[0] == [8 * len(trajectory) + count for count in own]


async def test_episodes_keep_apart_until_the_commit(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        assert [await visit(service, episode, "x:0") for episode in "aab"] == [1, 2, 1]
        assert await visit(service, "d", "x:0", scope="b") == 1
        await service.commit_visits()
        await service.commit_visits()
        assert await visit(service, "c", "x:0") == 4
        # An episode that goes on after a commit has its earlier visits among the stored ones, once.
        assert await visit(service, "a", "x:0") == 4
        assert await visit(service, "d", "x:0", scope="b") == 2


async def test_visits_are_neither_lost_nor_doubled_by_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.sqlite"
    async with serving(tmp_path) as service:
        await visit(service, "a", "x:0")
        await service.snapshot(path)
        await service.commit_visits()
        assert [await visit(service, "b", "x:0") for _ in range(2)] == [2, 3]
        await service.restore(path)  # what came after the snapshot is undone, committed or not
        assert await visit(service, "b", "x:0") == 2
    async with serving(tmp_path) as service:  # a closed service has committed
        assert await visit(service, "c", "x:0") == 3


async def test_a_search_leaves_out_what_is_known(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        step = Step("x:0", np.array(direction("x:0"), np.float32), "go")
        for number in range(4):
            assert await service.add_episode("a", f"e{number}", f"tip {number}", number, False, [step]) == number + 1
        found = await service.search("a", step.key, exclude=["tip 3"])
        assert [tip.text for tip in found] == ["tip 2", "tip 1"]
        assert service.size == 4


async def test_visits_at_once_are_looked_up_together_and_count_as_one_by_one(tmp_path: Path) -> None:
    """A hundred, of twenty episodes in two scopes. One more is given up, and one has no embedding."""
    states = ["x:0", "x:40", "x:80", "x:180", "x:182"]
    visits = [(f"e{number % 20}", states[number % 5], "ab"[number % 2]) for number in range(100)]
    counts = []
    for name in ("one by one", "at once"):
        (folder := tmp_path / name).mkdir()
        async with serving(folder) as service:
            await asyncio.gather(*(visit(service, f"past {each[0]}", *each[1:]) for each in visits[:30]))
            await service.commit_visits()
            if name == "one by one":
                counts.append([await visit(service, *each) for each in visits])
                continue
            keys = {state: await service.embed(state, urgent=False) for state in states}
            service._thread = Mock(wraps=service._thread)
            tasks = [asyncio.ensure_future(service.visit(scope, e, s, keys[s])) for e, s, scope in visits]
            given_up = asyncio.ensure_future(service.visit("a", "f", "x:0", keys["x:0"]))
            bad = asyncio.ensure_future(service.visit("a", "g", "x:0", np.zeros(2, np.float32)))
            commit = asyncio.ensure_future(service.commit_visits())  # while they are looked up
            await asyncio.sleep(0)
            given_up.cancel()
            counts.append(await asyncio.gather(*tasks))
            await commit
            with pytest.raises(ValueError, match="norm 0"):
                await bad
            assert service._thread.submit.call_count == 3  # the first visit's, all others', the commit
    assert counts[0] == counts[1]
