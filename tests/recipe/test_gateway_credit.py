"""What the gateway keeps of shown tips: credit, learned values, snapshots; and many clients at once."""

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from .house import ROOMS, House, Words, in_reflection, opened, turns, until

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


async def rows(house: House, query: str) -> list[tuple]:
    """Of a snapshot that is taken now."""
    path = house.folder / "snapshot.sqlite"
    (await house.client.post("/empo2/snapshot", json={"path": str(path)})).raise_for_status()
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


async def values(house: House) -> dict[str, float]:
    return dict(await rows(house, "SELECT text, value FROM tips"))


async def shown_in(house: House, score: Any, bodies: list[Any] = ROOMS, state: str = "succeeded") -> str:
    """A memory episode from beginning to end."""
    rollout = await house.create("memory")
    await house.play(rollout, bodies)
    await house.reward(rollout, score)
    await house.patch(rollout, state)
    await house.drain()
    return rollout


@pytest.mark.parametrize("retrieval", ["score", "similarity", "value"])
async def test_shown_tips_are_credited_under_every_policy(tmp_path: Path, retrieval: str):
    """Q <- Q + 0.3 (R - Q), with R the return times 0.01, once for each tip that an episode was shown."""
    async with opened(tmp_path, f"memory.retrieval={retrieval}", "memory.exploration=0") as house:
        await house.teach(ROOMS, "alpha", "beta")
        await house.teach(turns("the market fell by three percent"), "of another state")
        house.model.fault = in_reflection(500)  # the episodes to come leave no tips
        first = await shown_in(house, 50)
        second = await shown_in(house, -100, ROOMS[:1])
        after = await values(house)
        expected = 0.3 * 0.5 + 0.3 * (-1 - 0.3 * 0.5)
        assert after["alpha"] == after["beta"] == pytest.approx(expected)
        assert after["of another state"] == 0
        plays = await rows(house, "SELECT episode, scope, score, success, searches, hits FROM plays ORDER BY rowid")
        assert plays == [(first, "a", 50.0, 0, 3, 3), (second, "a", -100.0, 0, 1, 1)]
        credits = await rows(house, "SELECT credits.episode, text, turns FROM credits JOIN tips ON tips.id = tip_id")
        assert sorted(credits) == sorted(
            [(first, "alpha", 3), (first, "beta", 3), (second, "alpha", 1), (second, "beta", 1)]
        )


async def test_a_search_that_finds_nothing_is_a_play_without_credit(house: House):
    rollout = await shown_in(house, 7, ROOMS[:2])
    assert await rows(house, "SELECT episode, score, searches, hits FROM plays") == [(rollout, 7.0, 2, 0)]
    assert await rows(house, "SELECT * FROM credits") == []


async def test_failed_and_rewardless_episodes_credit_nothing(house: House):
    await house.teach(ROOMS, "alpha")
    await shown_in(house, 50, state="failed")
    await shown_in(house, None)
    await shown_in(house, "high")
    assert await values(house) == {"alpha": 0}
    assert await rows(house, "SELECT * FROM plays") == []


async def test_learned_values_decide_what_is_shown(tmp_path: Path):
    """Two tips of equal similarity: whichever has done harm when it was shown gives way."""
    options = ("memory.retrieval=value", "memory.top_k=1", "memory.candidates=2", "memory.exploration=0")
    async with opened(tmp_path, *options) as house:
        await house.teach(ROOMS[:1], "alpha", "beta")
        await house.play(await house.create("memory"), ROOMS[:1])
        assert "beta" in house.last().prompt  # all else equal, the newest
        house.tip = "alpha"
        await shown_in(house, -100, ROOMS[:1])
        await house.play(await house.create("memory"), ROOMS[:1])
        assert "- alpha" in house.last().prompt and "- beta" not in house.last().prompt


async def test_restore_goes_back_to_a_snapshot(house: House):
    await house.teach(ROOMS, "kept")
    path = house.folder / "checkpoint.sqlite"
    (await house.client.post("/empo2/snapshot", json={"path": str(path)})).raise_for_status()
    await house.teach(turns("cellar stairs", "some ladder"), "lost")
    await shown_in(house, 100)
    (await house.client.post("/empo2/restore", json={"path": str(path)})).raise_for_status()
    assert await values(house) == {"kept": 0}
    assert (await house.state())["memory_size"] == 1
    # The indices in RAM have followed: what is shown, and the visits before the snapshot and none of after it.
    rollout = await house.create("memory")
    await house.play(rollout, [ROOMS[0], *turns("cellar stairs")])
    calls = await house.events(rollout, "empo2_call")
    assert [(len(call["tip_ids"]), call["visits"]) for call in calls] == [(1, 2), (0, 1)]


@pytest.mark.parametrize(("verb", "words"), [("restore", "nowhere"), ("snapshot", "nowhere")])
async def test_a_path_that_cannot_be_is_answered_with_a_reason(house: House, verb: str, words: str):
    await house.teach(ROOMS, "kept")
    answer = await house.client.post(f"/empo2/{verb}", json={"path": str(house.folder / "nowhere" / "memory.sqlite")})
    assert answer.status_code == 409 and words in answer.json()["detail"]
    assert await values(house) == {"kept": 0}


async def test_a_snapshot_of_another_embedder_is_not_restored(house: House, tmp_path: Path):
    other = Words()
    other.name = "other"
    (tmp_path / "other").mkdir()
    async with opened(tmp_path / "other", words=other) as foreign:
        await foreign.teach(ROOMS, "foreign")
        path = tmp_path / "foreign.sqlite"
        (await foreign.client.post("/empo2/snapshot", json={"path": str(path)})).raise_for_status()
    await house.client.get("/empo2/state")
    answer = await house.client.post("/empo2/restore", json={"path": str(path)})
    assert answer.status_code == 409
    assert "'other'" in answer.json()["detail"] and "'words'" in answer.json()["detail"]


async def test_128_clients_read_and_write_at_once(house: House):
    """Each plays an episode in one of eight scopes: nothing is lost, mixed or counted twice."""
    scopes = [f"scope {number % 8}" for number in range(128)]
    for scope in scopes[:8]:
        await house.teach(ROOMS, f"the tip of {scope};", scope=scope)
    modes = ["memory" if number % 2 else "no-memory" for number in range(128)]
    rollouts = await asyncio.gather(
        *(house.create(mode, scope=scope) for mode, scope in zip(modes, scopes, strict=True))
    )

    async def episode(number: int, rollout: str) -> None:
        await house.play(rollout, ROOMS)
        await house.finish(rollout, float(number))

    house.tip = "Every client writes this."
    await asyncio.gather(*(episode(number, rollout) for number, rollout in enumerate(rollouts)))
    metrics = await house.drain(60)
    assert metrics["empo2/calls"] == 3 * 128
    assert metrics["empo2/memory_failures"] == metrics["empo2/reflections_failed"] == 0
    assert metrics["empo2/tips_written"] == 128  # equal texts of different scores
    for rollout, mode, scope in zip(rollouts, modes, scopes, strict=True):
        calls = await house.events(rollout, "empo2_call")
        assert len(calls) == 3 and {call["scope"] for call in calls} == {scope}
        assert all(bool(call["tip_ids"]) == (mode == "memory") for call in calls)
    # Each state of a scope: one visit by the teacher, one by each of its 16 players.
    assert await rows(house, "SELECT DISTINCT visits FROM states") == [(17,)]
    plays = await rows(house, "SELECT scope FROM plays")
    assert Counter(scope for (scope,) in plays) == {f"scope {number}": 16 for number in (1, 3, 5, 7)}
    crossed = "SELECT * FROM credits JOIN plays USING (episode) JOIN tips ON tips.id = tip_id"
    assert await rows(house, f"{crossed} WHERE plays.scope != tips.scope") == []
    assert await rows(house, "SELECT count(*) FROM credits") != [(0,)]


async def test_plain_grpo_loads_no_embedder(tmp_path: Path):
    loaded = []

    def load() -> Words:
        loaded.append(True)
        return Words()

    async with opened(tmp_path, "algorithm.name=grpo", embedder=load) as house:
        rollout = await house.create(None)
        await house.play(rollout, ROOMS)
        await house.finish(rollout)
        assert not loaded
    async with opened(tmp_path, embedder=load):
        await until(lambda: loaded)
