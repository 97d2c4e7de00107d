"""Scores of a group, and the advantages that are made of them."""

from collections.abc import Iterable

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
