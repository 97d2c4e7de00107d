"""What the gateway keeps of shown tips: credit, learned values, snapshots."""

from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.gateway.memory import open_memory

from .harness import ROOMS, GatewayUnderTest, Words, in_reflection, running_gateway, turns

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


async def values(gateway: GatewayUnderTest) -> dict[str, float]:
    return dict(await gateway.query("SELECT text, value FROM tips"))


async def shown_in(gateway: GatewayUnderTest, score: Any, bodies: list[Any] = ROOMS, state: str = "succeeded") -> str:
    rollout = await gateway.create()
    await gateway.play(rollout, bodies)
    await gateway.reward(rollout, score)
    await gateway.patch(rollout, state)
    await gateway.drain()
    return rollout


@pytest.mark.parametrize("retrieval", ["score", "value"])
async def test_shown_tips_are_credited_under_every_policy(tmp_path: Path, retrieval: str):
    """Q <- Q + 0.3 (R - Q), with R the return's place from -100 to 100, once for each tip that an episode was shown."""
    async with running_gateway(tmp_path, f"memory.retrieval={retrieval}", "memory.exploration=0") as gateway:
        await gateway.store_tips(ROOMS, "alpha", "beta")
        await gateway.store_tips(turns("the market fell by three percent"), "of another state")
        gateway.model.fault = in_reflection(500)  # the episodes to come leave no tips
        first = await shown_in(gateway, 50)
        second = await shown_in(gateway, -100, ROOMS[:1])
        after = await values(gateway)
        expected = pytest.approx(0.3 * 0.5 + 0.3 * (-1 - 0.3 * 0.5))
        assert after == {"alpha": expected, "beta": expected, "of another state": 0}
        nothing = await shown_in(gateway, 7, turns("where nobody was before"))
        plays = await gateway.query("SELECT episode, scope, score, success, searches, hits FROM plays ORDER BY rowid")
        assert plays == [(first, "a", 50.0, 0, 3, 3), (second, "a", -100.0, 0, 1, 1), (nothing, "a", 7.0, 0, 1, 0)]
        credits = await gateway.query("SELECT credits.episode, text, turns FROM credits JOIN tips ON tips.id = tip_id")
        assert sorted(credits) == sorted((episode, tip, 1) for episode in (first, second) for tip in ("alpha", "beta"))


async def test_a_tip_that_misleads_is_worth_less_than_one_that_was_never_tried(tmp_path: Path):
    """Of rewards 0 and 1: Q <- 0.3 (-1), then 0.3 (1 + 0.3) - 0.3; whatever ``return_scale``."""
    ends = ["algorithm.success_return=1", "algorithm.failure_return=0", "algorithm.return_scale=10"]
    async with running_gateway(tmp_path, "memory.retrieval=value", "memory.exploration=0", *ends) as gateway:
        await gateway.store_tips(ROOMS, "alpha")
        gateway.model.fault = in_reflection(500)
        for score, value in ((0, -0.3), (1, 0.09), (0.5, 0.063)):
            await shown_in(gateway, score, ROOMS[:1])
            assert await values(gateway) == {"alpha": pytest.approx(value)}


async def test_tips_of_a_paired_group_are_credited_with_what_they_added(gateway: GatewayUnderTest):
    """Q <- 0.3 (R - mean R of the pair without tips), when a step is over and all rollouts of the pair have ended."""
    await gateway.store_tips(ROOMS, "alpha")
    gateway.model.fault = in_reflection(500)

    async def play(pair: str, mode: str, score: Any, rollout: str | None = None) -> None:
        rollout = rollout or await gateway.create(mode, pair=pair)
        await gateway.play(rollout, ROOMS)
        await gateway.finish(rollout, score)
        await gateway.client.delete(f"/api/rollouts/{rollout}")

    outlives_the_step = await gateway.create("no-memory", pair="p")
    await play("p", "memory", 80)  # ends before what it is compared with
    await play("p", "no-memory", 20)
    await play("other", "no-memory", -100)
    await play("p", "no-memory", "lost")
    await gateway.drain()
    assert await values(gateway) == {"alpha": 0}
    await play("p", "no-memory", 40, outlives_the_step)
    assert await values(gateway) == {"alpha": 0}
    await gateway.drain()
    assert await values(gateway) == {"alpha": pytest.approx(0.3 * (0.8 - 0.3))}
    assert [row[0] for row in await gateway.query("SELECT score FROM plays")] == [80.0]
    await play("alone", "memory", 100)
    await gateway.drain()
    assert await values(gateway) == {"alpha": pytest.approx(0.15 + 0.3 * (1 - 0.15))}


async def test_failed_and_rewardless_episodes_are_neither_credited_nor_reflected_on(gateway: GatewayUnderTest):
    """Nothing is known of how they ended: a crash is not a lesson."""
    await gateway.store_tips(ROOMS, "alpha")
    reflections = len(gateway.reflections())
    await shown_in(gateway, 50, state="failed")
    await shown_in(gateway, None)
    await shown_in(gateway, "high")
    await gateway.finish(await gateway.create())  # without a call
    silent = await gateway.create()
    await gateway.play(silent, ROOMS)
    await gateway.patch(silent, "succeeded")
    assert (await gateway.drain())["empo2/reflections_failed"] == 0
    assert len(gateway.reflections()) == reflections
    assert await values(gateway) == {"alpha": 0}
    assert await gateway.query("SELECT * FROM plays") == []


async def test_restore_goes_back_to_a_snapshot(gateway: GatewayUnderTest):
    await gateway.store_tips(ROOMS, "kept")
    path = gateway.folder / "checkpoint.sqlite"
    (await gateway.client.post("/empo2/snapshot", json={"path": str(path)})).raise_for_status()
    await gateway.store_tips(turns("cellar stairs", "some ladder"), "lost")
    await shown_in(gateway, 100)
    (await gateway.client.post("/empo2/restore", json={"path": str(path)})).raise_for_status()
    assert await values(gateway) == {"kept": 0}
    assert (await gateway.state())["memory_size"] == 1
    # The indices in RAM have followed: what is shown, and the visits before the snapshot and none of after it.
    rollout = await gateway.create("memory")
    await gateway.play(rollout, [ROOMS[0], *turns("cellar stairs")])
    calls = await gateway.events(rollout, "empo2_call")
    assert [(len(call["tip_ids"]), call["visits"]) for call in calls] == [(1, 2), (0, 1)]


async def test_plain_grpo_loads_no_embedder_and_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded: list[str] = []
    load: Any = lambda model, device: loaded.append(model) or Words()  # noqa: E731
    monkeypatch.setattr("empo2.recipe.gateway.memory.SentenceEmbedder", load)
    file = tmp_path / "memory.sqlite"
    memory = open_memory(load_settings("cpu", ["algorithm.name=grpo"]), file)
    assert memory.size == 0
    await memory.close()
    assert not loaded and not file.exists()
    await open_memory(load_settings("cpu"), file).close()
    assert loaded == ["all-MiniLM-L6-v2"] and file.exists()
