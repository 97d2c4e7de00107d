"""Scores of a group, and the advantages that are made of them."""

from collections.abc import Iterable
from typing import Any

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import numpy as np
import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.protocol import Mode
from empo2.recipe.trainer.advantages import range_warning, rollout_advantages
from empo2.recipe.trainer.step_results import RolloutResult

PAPER = load_settings("gpu").algorithm


def group(returns: Iterable[float], intrinsic: Iterable[float]) -> dict[str, RolloutResult]:
    """The rollouts of one group, which share a mode."""
    pairs = enumerate(zip(returns, intrinsic, strict=True))
    return {str(i): RolloutResult("g", Mode.of(memory=False), *pair) for i, pair in pairs}


def advantages(returns: list[float], intrinsic: list[float]) -> list[float]:
    return list(rollout_advantages(group(returns, intrinsic), PAPER).values())


def by_hand(scores: list[float]) -> Any:
    deviation = np.std(scores, ddof=1)
    return pytest.approx([(score - np.mean(scores)) / (deviation + 1e-6) for score in scores], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("spread", [0.0003, 0.4, 20.0])
def test_solved_group_has_no_gradient(spread: float) -> None:
    """Eight rollouts that all reach 100, whose intrinsic rewards differ: by order of arrival, or by their length."""
    intrinsic = np.linspace(1, 1 + spread, 8).tolist()
    assert advantages([100.0] * 8, intrinsic) == [0.0] * 8


def test_new_states_in_an_unsolved_group_are_a_signal() -> None:
    """One rollout of eight found three states that no one had seen: + 3; the others walked where all have been."""
    intrinsic = [0.30, 0.31, 0.29, 0.33, 3.25, 0.30, 0.28, 0.32]
    made = advantages([8.0] * 8, intrinsic)
    assert made == by_hand([0.01 * (8 + value) for value in intrinsic])
    assert made[4] > 2.4 and max(made[:4] + made[5:]) < 0


@pytest.mark.parametrize("members", range(2, 9))
@pytest.mark.parametrize("level", [0.0, 1 / 3, 33.3, -77.7, 123456.7])
def test_equal_scores_have_no_advantage(members: int, level: float) -> None:
    """Exactly: the mean of seven equal scores need not be that score; divided by an std of 1e-6 that is a signal."""
    assert advantages([level] * members, [0.001 * i for i in range(members)]) == [0.0] * members


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (0.0, 100.0), (-100.0, 100.0), (3.0, 3.5)])
def test_rewards_in_other_units_behave_the_same(lowest: float, highest: float, normalize_by_std: bool) -> None:
    """Returns are 0.2, 0.5, ... of the range; a new state is worth a hundredth of it, whatever the units."""
    shares, intrinsic = np.array([0.2, 0.5, 0.2, 0.203]), np.array([1.0, 0.25, 3.0, 1.0])
    algorithm = load_settings().algorithm.model_copy(
        update={"failure_return": lowest, "success_return": highest, "normalize_by_std": normalize_by_std}
    )
    returns = lowest + shares * (highest - lowest)
    scores = shares + 0.01 * intrinsic
    wanted = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6 if normalize_by_std else 1)
    made = list(rollout_advantages(group(returns, intrinsic), algorithm).values())
    assert made == pytest.approx(wanted.tolist(), rel=1e-6, abs=1e-9)
    # Less than a two-hundredth of the range apart, and all successes: nothing is learned in any units.
    for share, spread in ((0.3, 0.002), (1.0, 0.0)):
        near = [lowest + (share + spread * i) * (highest - lowest) for i in range(3)]
        alike = group(near, [1.0 * (share == 1) * i for i in range(3)])
        assert set(rollout_advantages(alike, algorithm).values()) == {0.0}


def test_returns_outside_of_their_range_are_a_warning() -> None:
    def warning(*returns: float) -> str:
        return range_warning(group(returns, [0.0] * len(returns)), load_settings().algorithm)

    assert warning(0.0, 0.4, 1.0) == ""
    assert "returns are 0 to 87, outside of algorithm.failure_return=0 to success_return=1;" in warning(0.0, 87.0)
    assert "returns are -0.1 to 1" in warning(-0.1, 1.0)


def test_return_counts_beside_the_intrinsic_reward() -> None:
    """Together, not each by itself: what one rollout earned the other explored."""
    assert advantages([10.0, 12.0], [2.2, 0.0]) == [0.0, 0.0]
    assert advantages([10.0, 12.0], [2.6, 0.0])[0] > 0.7
