"""REMEMBERER: n-step targets, the choice of records, and the values of actions after episodes, by hand."""

from pathlib import Path

import numpy as np
import pytest

from empo2.memory.retrieval import Entries
from empo2.recipe.baselines.rememberer.records import n_step_target, policy
from empo2.recipe.config import load_settings

from .harness import running_gateway, turns


def test_n_step_targets_by_hand() -> None:
    """Of seven steps the last earns 1, the second 0.5; 0.95² = 0.9025, 0.95⁴ = 0.81450625, 0.95⁵ = 0.7737809375."""
    rewards = [0.0, 0.5, 0, 0, 0, 0, 1.0]
    assert n_step_target(rewards, 6, 9.0) == 1.0  # what comes after the end is worth nothing
    assert n_step_target(rewards, 4, 9.0) == pytest.approx(0.9025)
    assert n_step_target(rewards, 2, 9.0) == pytest.approx(0.81450625)
    assert n_step_target(rewards, 1, 0.8) == pytest.approx(0.5 + 0.7737809375 * 0.8)
    assert n_step_target(rewards, 0, 0.8) == pytest.approx(0.95 * 0.5 + 0.7737809375 * 0.8)


def test_the_best_and_the_worst_of_the_most_similar() -> None:
    """The last is too far, the one before it no candidate; of the other five the best two and the worst are shown."""
    similarities, q = [0.99, 0.99, 0.98, 0.97, 0.96, 0.95, 0.5], [0.1, 0.4, 0.9, -1.0, 0.2, 5.0, 9.0]
    entries = Entries(*map(np.array, (similarities, q, [0.0] * 7, range(7))))
    for top_k, found in ((3, [2, 1, 3]), (4, [2, 1, 0, 3]), (9, [2, 1, 4, 0, 3])):
        chosen = {"retrieval": "actions", "top_k": top_k, "min_similarity": 0.6, "candidates": 5}
        assert policy(load_settings(layer={"memory": chosen}))(entries).tolist() == found


async def test_values_are_learned_and_shown(tmp_path: Path, empty_stores: None) -> None:
    """The model says "go 0" in a hall, "go 1" in a cellar; the returns are 1, 0 and then 1 of the cellar alone.

    First Q(cellar, go 1) = 1 and Q(hall, go 0) = 0.95. With a rate of 0.5 a failure halves them. In the third episode
    "go 0" is said in the cellar, a record of its own with 1.
    """
    settings = [
        "algorithm.return_scale=1",
        "reflection.form=actions",
        "memory.retrieval=actions",
        "memory.value_learning_rate=0.5",
    ]
    async with running_gateway(tmp_path, *settings, "memory.min_similarity=0.9", "memory.scope=all-tasks") as gateway:

        async def records() -> list[tuple]:
            return await gateway.query(
                "SELECT state, action, round(score, 6) FROM entries JOIN tips ON tips.id = tip_id"
            )

        both = turns("a hall", "a cellar with a chest")
        await gateway.play(first := await gateway.create("no-memory"), both)
        await gateway.ended(first, 1.0)
        assert sorted(await records()) == [("a cellar with a chest", "go 1", 1.0), ("a hall", "go 0", 0.95)]
        await gateway.play(second := await gateway.create("memory"), both)
        shown = gateway.last().prompt
        await gateway.ended(second, 0.0)
        assert sorted(await records()) == [("a cellar with a chest", "go 1", 0.5), ("a hall", "go 0", 0.475)]
        await gateway.play(third := await gateway.create("memory"), turns("a cellar with a chest"))
        after = gateway.last().prompt
        metrics = await gateway.ended(third, 1.0)
        assert sorted(await records())[:2] == [
            ("a cellar with a chest", "go 0", 1.0),
            ("a cellar with a chest", "go 1", 0.5),
        ]
        assert not gateway.reflections()
    assert '- here "go 0" was worth 0.95\n' in shown and '- here "go 1" was worth 1.00\n' in shown
    assert '- here "go 1" was worth 0.50\n' in after and "go 0" not in after
    assert metrics["empo2/tips_written"] == 1
