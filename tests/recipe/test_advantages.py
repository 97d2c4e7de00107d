"""Advantages of paired groups, and what tips are worth, against numbers by hand and in numpy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.protocol import Mode, is_success
from empo2.recipe.trainer.advantages import rollout_advantages, tip_gain, worth_imitating
from empo2.recipe.trainer.step_results import RolloutResult

PAPER = load_settings("gpu").algorithm  # returns of -100..100, a tolerance of 0.5
WITHOUT, ON, OFF = Mode.of(memory=False), Mode.of(memory=True), Mode.of(memory=True, off_policy=True)


def group(without: list[float], with_tips: list[float], mode: Mode = OFF, name: str = "g") -> dict[str, RolloutResult]:
    """Rollouts by id: u0, u1, ... without tips, t0, t1, ... with tips, in turn."""
    made = {f"{name}u{i}": RolloutResult(name, WITHOUT, value) for i, value in enumerate(without)}
    made |= {f"{name}t{i}": RolloutResult(name, mode, value) for i, value in enumerate(with_tips)}
    return dict(sorted(made.items(), key=lambda item: item[0][-1]))


def advantages(results: dict[str, RolloutResult], **changes: Any) -> tuple[list[float], list[float]]:
    """Of the rollouts without tips, and of those with."""
    made = rollout_advantages(results, PAPER.model_copy(update=changes))
    assert made.keys() == results.keys()
    names = sorted(made)
    return [made[name] for name in names if "u" in name], [made[name] for name in names if "t" in name]


@pytest.mark.parametrize(
    ("without", "with_tips", "mode", "found"),
    [
        # No half has any variance. Of 0 0 0 0 1 1 1 1, mean of the first half 0, std √(4·4/(8·7)) = 0.5345.
        ([0.0] * 4, [100.0] * 4, OFF, ([0.0] * 4, [1 / 0.53452] * 4)),
        # On-policy halves are groups of their own: a constant added to all advantages is noise. ±0.2 / 0.23094.
        ([0.0] * 4, [100.0, 100.0, 60.0, 60.0], ON, ([0.0] * 4, [0.8660, 0.8660, -0.8660, -0.8660])),
        ([0.0] * 4, [100.0] * 4, ON, ([0.0] * 4, [0.0] * 4)),
        # One rollout without tips is a baseline, though it is compared with none itself; std of .2 .2 .8 is .6 / √3.
        ([20.0], [20.0, 80.0], OFF, ([0.0], [0.0, np.sqrt(3)])),
        ([20.0, 80.0], [50.0], ON, ([-np.sqrt(0.5), np.sqrt(0.5)], [0.0])),
        # The tolerance is over all that are compared: 0.4 is less than 0.5, 0.6 of both halves is more.
        ([8.0, 8.0], [8.4, 8.4], OFF, ([0.0] * 2, [0.0] * 2)),
        ([8.0, 8.4], [8.0, 8.6], OFF, ([0.0] * 2, [-0.2 / 0.3, 0.4 / 0.3])),
    ],
)
def test_halves_of_a_pair(without: list[float], with_tips: list[float], mode: Mode, found: tuple[Any, Any]) -> None:
    made = advantages(group(without, with_tips, mode))
    assert made == tuple(pytest.approx(half, rel=1e-3) for half in found)
    assert advantages(group([0.0] * 4, [100.0] * 4), normalize_by_std=False) == ([0.0] * 4, [1.0] * 4)


def test_mixed_halves_in_numpy() -> None:
    """Without tips: a GRPO group of its own. With tips: mean of those without, deviation of all."""
    untipped, tipped = [10.0, 40.0, 0.0, 20.0], [60.0, 90.0, 30.0, 100.0]
    without, with_tips = advantages(group(untipped, tipped))
    u, t = np.array(untipped) / 100, np.array(tipped) / 100
    assert without == pytest.approx(((u - u.mean()) / (u.std(ddof=1) + 1e-6)).tolist())
    assert with_tips == pytest.approx(((t - u.mean()) / (np.concatenate([u, t]).std(ddof=1) + 1e-6)).tolist())
    assert np.mean(with_tips) > 1.3  # what the tips are worth stays in the gradient


def test_intrinsic_reward_counts_as_long_as_the_comparison_is_unsolved() -> None:
    """All without tips solve the task: their intrinsic rewards are left out where they are compared with each other,
    not where the others, of which one fails, are compared with them."""
    results = {
        "u0": RolloutResult("g", WITHOUT, 100.0, 1.0),
        "u1": RolloutResult("g", WITHOUT, 100.0, 9.0),
        "t0": RolloutResult("g", OFF, 100.0, 0.0),
        "t1": RolloutResult("g", OFF, 0.0, 2.0),
    }
    without, with_tips = advantages(results)
    assert without == [0.0, 0.0]
    scores = np.array([1.01, 1.09, 1.0, 0.02])
    assert with_tips == pytest.approx(((scores[2:] - 1.05) / (scores.std(ddof=1) + 1e-6)).tolist())


def test_what_a_tip_is_worth() -> None:
    """(0.75 - 0.25 + 0.1 - 0.3) / 2, whatever the intrinsic rewards and the sizes of the groups."""
    results = group([0.0, 50.0], [50.0, 100.0], name="a") | group([20.0, 40.0], [10.0], ON, name="b")
    results |= group([5.0, 6.0], [], name="c") | {"d": RolloutResult("d", OFF, 99.0, 5.0)}
    assert tip_gain(results, PAPER) == pytest.approx((0.5 - 0.2) / 2)
    assert tip_gain(group([5.0, 6.0], []), PAPER) is None


@pytest.mark.parametrize(
    ("without", "with_tips", "mode", "chosen"),
    [
        ([], [100.0, 100.0], OFF, "01"),  # equal, with advantages of 0: the rollouts that count
        ([], [40.0, 40.0, 40.0], OFF, ""),
        ([], [0.0, 40.0, 80.0], OFF, "2"),  # above the mean of the group, 40
        ([0.0, 20.0], [10.0, 10.4, 10.6, 30.0], OFF, "23"),  # above the mean without tips, 10, by the tolerance, 0.5
        ([100.0, 100.0], [0.0, 100.0], OFF, "1"),  # misleading tips are not imitated
        ([0.0, 0.0], [100.0, 100.0], ON, ""),
    ],
)
def test_rollouts_that_are_worth_imitating(without: list[float], with_tips: list[float], mode: Mode, chosen: str):
    results = group(without, with_tips, mode) | group([0.0, 100.0], [], name="other")
    assert worth_imitating(results, PAPER) == {f"gt{number}" for number in chosen}


def test_novelty_and_rounding_are_not_worth_imitating() -> None:
    results = {name: replace(each, intrinsic=9.0 * (name == "gt0")) for name, each in group([], [0.3] * 3).items()}
    assert not worth_imitating(results, PAPER.model_copy(update={"return_tolerance": 0.0}))


def test_rounded_numbers_are_what_they_were_meant_to_be() -> None:
    """Ten rewards of 0.1 are a success; half the reward of a new state is as large as the tolerance, not smaller."""
    rounded = float(np.cumsum([0.1] * 10)[-1])
    assert rounded == 0.9999999999999999 and is_success(rounded, 1.0) and is_success(99.9999, 100.0)
    assert not is_success(0.99999, 1.0) and not is_success(99.99, 100.0)
    range_ = {"success_return": 1.0, "failure_return": 0.0, "return_scale": None, "return_tolerance": 0.005}
    unit = PAPER.model_copy(update={**range_, "intrinsic_coefficient": 0.01})
    found = rollout_advantages({n: RolloutResult("g", WITHOUT, rounded, float(n)) for n in "12"}, unit)
    assert found == {"1": 0.0, "2": 0.0}
    for low in (0.0, 0.1, 0.3, 0.7):  # 0.7 + 0.015 - (0.7 + 0.01) is 0.00500...03, others are below 0.005
        results = {n: RolloutResult("g", WITHOUT, low, float(n)) for n in ("1", "1.5")}
        assert rollout_advantages(results, unit)["1.5"] == pytest.approx(0.70711, rel=1e-3)
        gained = {"u": RolloutResult("g", WITHOUT, low), "t": RolloutResult("g", OFF, low + 0.005)}
        assert worth_imitating(gained, unit) == set()  # by the tolerance, not by more


@pytest.mark.parametrize("most", [1e155, 1e300, 1e308, 1.7e308])
def test_returns_as_large_as_a_float_can_be(most: float) -> None:
    """Of (1, 1, -1, -1) the deviation is √(4/3); of (1, 0, 0, 0) it is 1/2."""
    both, one = [most, most, -most, -most], [most, 0.0, 0.0, 0.0]
    assert advantages(group(both, []))[0] == pytest.approx([np.sqrt(0.75)] * 2 + [-np.sqrt(0.75)] * 2)
    assert advantages(group(one, []))[0] == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert advantages(group(one, []), normalize_by_std=False)[0] == pytest.approx([1e20] + [-1e20] * 3)
    assert worth_imitating(group([0.0], [most, -most]), PAPER) == {"gt0"}


def novel(returns: list[float], intrinsic: list[float], modes: list[Mode] | None = None, **changes: Any) -> list[float]:
    """Advantages with a plain intrinsic reward of a hundredth a new state; returns of 0..100."""
    modes = modes or [WITHOUT] * len(returns)
    results = {
        str(i): RolloutResult("g", mode, return_, new)
        for i, (mode, return_, new) in enumerate(zip(modes, returns, intrinsic, strict=True))
    }
    plain = {"intrinsic_advantage": "plain", "intrinsic_coefficient": 0.01, "failure_return": 0.0} | changes
    made = rollout_advantages(results, PAPER.model_copy(update=plain))
    return [made[str(i)] for i in range(len(returns))]


def test_a_plain_intrinsic_reward_joins_the_advantage_as_it_is() -> None:
    # Returns 0, 0, 0, 1: mean 1/4, deviation 1/2. New states 2, 0, 1, 1: their mean is 1, a hundredth each.
    assert novel([0, 0, 0, 100], [2, 0, 1, 1]) == pytest.approx([-0.49, -0.51, -0.5, 1.5], abs=1e-5)
    # All fail: 1/n alone, a hundredth; as part of the score it would be ±1.22 (2, 0, 1, 1 in deviations of .816).
    assert novel([0] * 4, [2, 0, 1, 1]) == pytest.approx([0.01, -0.01, 0, 0])
    as_score = novel([0] * 4, [2, 0, 1, 1], intrinsic_advantage="normalized")
    assert as_score == pytest.approx([1.2247, -1.2247, 0, 0], abs=2e-4)
    assert novel([100] * 4, [2, 0, 1, 1]) == [0] * 4  # nothing is left to explore
    # Its size follows from the coefficient alone, not from the scale of the returns.
    scaled = novel([0, 0, 0, 100], [2, 0, 1, 1], return_scale=7.0, intrinsic_coefficient=0.1)
    assert scaled == pytest.approx([-0.4, -0.6, -0.5, 1.5], abs=1e-5)


def test_a_plain_intrinsic_reward_of_pairs_has_their_baselines() -> None:
    """Without tips 1 and 3 new states, with tips 4 and 0: those without have a mean of 2, which is the others', too."""
    modes = [WITHOUT, OFF, WITHOUT, OFF]
    assert novel([0, 100, 0, 100], [1, 4, 3, 0], modes) == pytest.approx([-0.01, 1.7521, 0.01, 1.7121], abs=1e-3)
    on_policy = [WITHOUT, ON, WITHOUT, ON]
    assert novel([0, 100, 0, 100], [1, 4, 3, 0], on_policy) == pytest.approx([-0.01, 0, 0.01, 0])
