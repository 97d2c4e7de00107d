"""Rounding at random, against the values that bfloat16 has around a number."""

import pytest
import torch

from empo2.recipe.trainer.compat.rounding import rounded_at_random


@pytest.mark.parametrize(("value", "below", "above"), [(1 + 1 / 512, 1, 1 + 1 / 128), (-3.001, -3, -3 - 1 / 64)])
def test_the_mean_is_right(value: float, below: float, above: float) -> None:
    """bfloat16 has seven bits behind the first; the nearest value alone would lose all that was added."""
    found = rounded_at_random(torch.full((100_000,), value), torch.Generator().manual_seed(0)).double()
    assert set(found.tolist()) == {below, above}
    chance = (value - below) / (above - below)
    assert found.mean() == pytest.approx(value, abs=5 * abs(above - below) * (chance * (1 - chance) / 100_000) ** 0.5)


def test_what_bfloat16_holds_stays() -> None:
    weights = torch.randn(1000).bfloat16()
    assert torch.equal(rounded_at_random(weights.float(), torch.Generator().manual_seed(0)), weights)


def test_small_changes_of_many_weights_reach_what_they_multiply() -> None:
    """A LoRA's after 16 updates at 3e-6: a tenth of it is left by the nearest values."""
    torch.manual_seed(0)
    base = (0.03 * torch.randn(512, 512)).bfloat16().float()
    learned = 3e-6 * 16 * torch.randn(512, 64).sign() @ ((2 * torch.rand(64, 512) - 1) / 512**0.5)
    inputs = torch.randn(2000, 512)
    exact = inputs @ learned.T
    shares = []
    for weights in ((base + learned).bfloat16(), rounded_at_random(base + learned, torch.Generator().manual_seed(0))):
        reached = inputs @ (weights.float() - base).T
        shares.append(float((reached * exact).sum() / exact.square().sum()))
    assert shares[0] < 0.3 and shares[1] == pytest.approx(1, abs=0.1)
