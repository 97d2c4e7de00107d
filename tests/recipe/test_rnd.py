"""Random network distillation as the novelty: a step of its predictor by hand, and what it is in a gateway."""

from pathlib import Path

import numpy as np
import pytest

from empo2.recipe.baselines.rnd.novelty import RandomNetwork

from .harness import ROOMS, running_gateway


def test_one_visit_by_hand() -> None:
    """Wanted is 2 · 0.6 = 1.2, predicted 0.7 · 1: the error is -0.5.

    The step is 0.1: outer 1 + 0.1 · 0.7 · 0.5 = 1.035, inner 0.5 + 0.1 · 0.5 · (0.6, 0.8) = (0.53, 0.54). Now
    0.75 · 1.035 = 0.77625 is predicted; the error is -0.42375, of whose first square 0.718256 is left.
    """
    network = RandomNetwork(
        (np.array([[1.0], [0.0]]), np.array([[2.0]])), (np.array([[0.5], [0.5]]), np.array([[1.0]]))
    )
    key = np.array([0.6, 0.8])
    assert network.novelty(key) == 1
    network.learn(key)
    assert network.predictor[0].ravel() == pytest.approx([0.53, 0.54])
    assert network.predictor[1].ravel() == pytest.approx([1.035])
    assert network.novelty(key) == pytest.approx(0.718256)
    assert network.novelty(np.array([-1.0, 0.0])) == 0  # 0 is wanted, and predicted from the beginning


def test_visited_states_become_known_and_others_stay_new() -> None:
    draws = np.random.default_rng(1).standard_normal((3, 384))
    seen, near, far = (draws[0], draws[0] + 0.3 * draws[1], draws[2])
    seen, near, far = (key / np.linalg.norm(key) for key in (seen, near, far))
    network, rewards = RandomNetwork.drawn(384, seed=0), []
    for _ in range(20):
        rewards.append(network.novelty(seen))
        network.learn(seen)
    assert rewards == sorted(rewards, reverse=True) and rewards[0] == 1 and rewards[-1] < 0.05
    assert network.novelty(seen) < network.novelty(near) < 0.5 and network.novelty(far) > 0.8


async def test_a_step_is_learned_when_it_is_over_and_a_snapshot_holds_what_was_learned(
    tmp_path: Path, empty_stores: None
) -> None:
    async with running_gateway(tmp_path, "algorithm.novelty=rnd") as gateway:

        async def rewards() -> list[float]:
            rollout = await gateway.create("memory")
            await gateway.play(rollout, ROOMS)
            return [event["intrinsic_reward"] for event in await gateway.events(rollout, "empo2_call")]

        first, same_step = await rewards(), await rewards()
        await gateway.drain()
        second = await rewards()
        saved = {"path": str(tmp_path / "saved.sqlite")}
        (await gateway.client.post("/empo2/snapshot", json=saved)).raise_for_status()
        third = await rewards()  # a snapshot commits, as a drain does
        await gateway.drain()
        later = await rewards()
        (await gateway.client.post("/empo2/restore", json=saved)).raise_for_status()
        assert await rewards() == pytest.approx(third)
        await gateway.drain()
        before = await rewards()
    async with running_gateway(tmp_path, "algorithm.novelty=rnd") as gateway:  # started again with its memory
        after = await rewards()
    assert all(0 < new < old for new, old in zip(after, before, strict=True)), "what was played last counts, too"
    assert first == same_step == [1.0] * len(ROOMS)
    for earlier, after in ((first, second), (second, third), (third, later)):
        assert all(new < old for new, old in zip(after, earlier, strict=True))
