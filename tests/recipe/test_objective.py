"""The objective against numbers worked out in numpy, token by token, from the paper's formulas."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import numpy as np
import pytest
import torch
from agentlightning.verl.per_rollout_loss import PER_ROLLOUT_MEAN_LOSS_MODE
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from empo2.recipe.trainer.objective import hybrid_loss, trust_mask

LOW, HIGH, DUAL = 0.20, 0.30, 10.0
DELTA = 0.0067
ELSEWHERE = -3.3  # log-prob of every position that belongs to no response token: none of it may leak in


@dataclass
class Row:
    """A training row: one number per response token. ``mask`` is 0 for the tokens of observations."""

    new: list[float]  # log π_θ
    old: list[float]  # log π_old
    advantage: float | list[float]
    off_policy: bool = False
    mask: list[int] | None = None
    prompt: int = 2
    ref: list[float] | None = None
    weight: float = 0.0  # 1/(M T), of the KL term: the advantages hold it already
    recorded: bool = False

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.mask if self.mask is not None else [1] * len(self.new), dtype=bool)

    @property
    def advantages(self) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.advantage, dtype=float), len(self.new))


def actor_config(**changes: Any) -> FSDPActorConfig:
    values: dict[str, Any] = {
        "strategy": "fsdp2",
        "rollout_n": 8,
        "ppo_micro_batch_size_per_gpu": 1,
        "clip_ratio": HIGH,
        "clip_ratio_low": LOW,
        "clip_ratio_high": HIGH,
        "clip_ratio_c": DUAL,
        "policy_loss": PolicyLossConfig(loss_mode=PER_ROLLOUT_MEAN_LOSS_MODE),
    }
    return FSDPActorConfig(**values | changes)


def tensors_of(rows: list[Row], width: int, length: int) -> dict[str, torch.Tensor]:
    """The rows as verl pads them: prompts of ``width`` tokens on the left, replies of ``length`` on the right."""
    count = len(rows)
    attention = torch.zeros(count, width + length, dtype=torch.long)
    tensors = {
        name: torch.zeros(count, length) for name in ("response_mask", "old_log_probs", "advantages", "ref_log_prob")
    }
    for i, row in enumerate(rows):
        size = len(row.new)
        attention[i, width - row.prompt : width + size] = 1
        tensors["response_mask"][i, :size] = torch.from_numpy(row.tokens)
        tensors["old_log_probs"][i, :size] = torch.tensor(row.old)
        tensors["advantages"][i, :size] = torch.tensor(row.advantages * row.tokens)
        if row.ref is not None:
            tensors["ref_log_prob"][i, :size] = torch.tensor(row.ref)
    ids = torch.arange(count * (width + length)).view(count, -1)
    return tensors | {
        "response_mask": tensors["response_mask"].long(),
        "input_ids": ids,
        "prompts": ids[:, :width],
        "responses": ids[:, width:],
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp_min(0),
        "off_policy": torch.tensor([row.off_policy for row in rows]),
        "token_weight": torch.tensor([row.weight for row in rows]),
        "recorded": torch.tensor([row.recorded for row in rows]),
    }


def micro_batch(rows: list[Row]) -> tuple[TensorDict, dict[str, Any], list[torch.Tensor]]:
    """What a worker hands to its loss function, made by verl's own padding, and the leaves of its log-probs."""
    tensors = tensors_of(rows, max(row.prompt for row in rows) + 1, max(len(row.new) for row in rows) + 1)
    if all(row.ref is None for row in rows):
        del tensors["ref_log_prob"]
    data = left_right_2_no_padding(TensorDict(tensors, batch_size=len(rows)))
    tokens = int(sum(row.tokens.sum() for row in rows))
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(rows))
    # The model's output at a position is the log-prob of the next token.
    leaves = [torch.tensor([ELSEWHERE] * (row.prompt - 1) + row.new + [ELSEWHERE], requires_grad=True) for row in rows]
    offsets = torch.tensor([0, *np.cumsum([len(leaf) for leaf in leaves])])
    return data, {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(leaves), offsets)}, leaves


@dataclass
class Result:
    loss: float
    gradients: list[np.ndarray]  # of each row's response tokens
    metrics: dict[str, Any]
    elsewhere: float  # sum of |gradient| at all other positions
    masked_at: list[int] | None  # None of another loss


def run(
    rows: list[Row], *, delta: float = DELTA, gap_limit: float = math.inf, loss_function: Any = None, **config: Any
) -> Result:
    data, output, leaves = micro_batch(rows)
    arguments = {"config": actor_config(**config), "model_output": output, "data": data}
    ours = partial(hybrid_loss, mask_threshold=delta, gap_limit=gap_limit)
    loss, metrics = (loss_function or ours)(**arguments)
    loss.backward()
    responses, elsewhere = [], 0.0
    for leaf, row in zip(leaves, rows, strict=True):
        assert leaf.grad is not None
        before, response, after = leaf.grad.split([row.prompt - 1, len(row.new), 1])
        responses.append(response.numpy())
        elsewhere += float(before.abs().sum() + after.abs().sum())
    return Result(loss.item(), responses, metrics, elsewhere, metrics.pop("masked_at", None))


def expected(rows: list[Row], *, delta: float = DELTA) -> tuple[float, list[np.ndarray]]:
    """-Σ mask·1[π_θ ≥ δ or on-policy]·min(rA, clip(r)A), dual-clipped for A < 0; its derivative by log π_θ."""
    loss, gradients = 0.0, []
    for row in rows:
        new, gradient = np.array(row.new), np.zeros(len(row.new))
        ratio = np.exp(np.clip(new - np.array(row.old), -20, 20))
        for t in range(len(new)):
            if not row.tokens[t] or (row.off_policy and delta > 0 and new[t] < math.log(delta)):
                continue
            a, r = row.advantages[t], ratio[t]
            if a >= 0:
                loss -= min(r * a, min(max(r, 1 - LOW), 1 + HIGH) * a)
                gradient[t] = -a * r if r <= 1 + HIGH else 0.0
            else:
                loss += min(DUAL * -a, max(r, min(max(r, 1 - LOW), 1 + HIGH)) * -a)
                gradient[t] = -a * r if 1 - LOW <= r <= DUAL else 0.0
        gradients.append(gradient)
    return loss, gradients


def assert_as_expected(rows: list[Row], *, delta: float = DELTA) -> Result:
    result, (loss, gradients) = run(rows, delta=delta), expected(rows, delta=delta)
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
    for got, want in zip(result.gradients, gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    assert result.elsewhere == 0
    return result


def random_rows(seed: int, count: int) -> list[Row]:
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        size = int(generator.integers(1, 9))
        old = generator.uniform(-7, 0, size)
        mask = generator.integers(0, 2, size)
        mask[0] = 1
        rows.append(
            Row(
                new=(old + generator.normal(0, 0.4, size)).clip(max=0).tolist(),
                old=old.tolist(),
                advantage=float(generator.normal()),
                off_policy=bool(generator.integers(0, 2)),
                mask=mask.tolist(),
                prompt=int(generator.integers(1, 6)),
            )
        )
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_loss_and_gradient_of_mixed_batches(seed: int) -> None:
    assert_as_expected(random_rows(seed, count=6))


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "flows"),
    [
        (1.299, +1.0, -1.299, True),
        (1.301, +1.0, -1.3, False),
        (0.799, +1.0, -0.799, True),  # below the lower edge a good token may still be raised
        (0.801, -1.0, 0.801, True),
        (0.799, -1.0, 0.8, False),
        (1.301, -1.0, 1.301, True),  # above the upper edge a bad token may still be lowered
        (9.99, -1.0, 9.99, True),
        (10.01, -1.0, 10.0, False),  # dual clip
        (10.01, +1.0, -1.3, False),
    ],
)
def test_clip_edges(ratio: float, advantage: float, loss: float, flows: bool, off_policy: bool) -> None:
    result = assert_as_expected(
        [Row(new=[-1.0], old=[-1.0 - math.log(ratio)], advantage=advantage, off_policy=off_policy)]
    )
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert bool(result.gradients[0][0] != 0) is flows


def test_mask_is_per_token_on_the_current_policy() -> None:
    """The authors' code masks whole rows, by their lowest token, on the tip-conditioned log-prob."""
    low, high = math.log(DELTA) - 0.01, math.log(DELTA) + 0.01
    row = Row(
        new=[high, low, -0.1, low],
        old=[low - 0.1, -0.1, low, low],
        advantage=1.0,
        off_policy=True,
    )
    result = assert_as_expected([row])
    assert (result.gradients[0] != 0).tolist() == [True, False, False, False]  # the third is clipped: its ratio is high
    row.old[2] = -0.1
    assert (assert_as_expected([row]).gradients[0] != 0).tolist() == [True, False, True, False]


def test_mask_leaves_the_denominators() -> None:
    """1/(NT) stays: the loss is the sum without the masked terms, not a mean over the unmasked ones."""
    share = 1 / (2 * 4)  # a rollout of four tokens among two rows
    row = Row(new=[-1.0, -9.0, -1.0, -9.0], old=[-1.0, -9.0, -1.0, -9.0], advantage=share, off_policy=True)
    assert run([row], delta=DELTA).loss == pytest.approx(-2 * share)
    assert run([row], delta=0).loss == pytest.approx(-4 * share)


def test_threshold_is_a_probability() -> None:
    """δ as the authors' log-prob -5: a token at -4.9 is trusted, one at -5.1 is not, at -5 itself it is (≥)."""
    threshold = math.exp(-5)
    log_prob = torch.tensor([[-4.9, -5.0 + 1e-6, -5.1]])
    assert trust_mask(log_prob, torch.tensor([True]), threshold).tolist() == [[True, True, False]]
    assert trust_mask(torch.tensor([[0.0]]), torch.tensor([True]), 1.0).tolist() == [[True]]


@pytest.mark.parametrize("off_policy", [False, True])
def test_row_without_tokens_weighs_nothing(off_policy: bool) -> None:
    row = Row(new=[-1.0, -9.0], old=[-0.5, -0.5], advantage=1.0, off_policy=off_policy)
    empty = Row(new=[-1.0, -9.0], old=[-0.5, -0.5], advantage=1.0, off_policy=off_policy, mask=[0, 0])
    alone, both = run([row]), assert_as_expected([row, empty])
    assert both.loss == alone.loss
    assert (both.gradients[1] == 0).all()
    for name in ("off_policy_tokens", "masked_tokens", "compared_rows", "log_ppl_gap"):
        assert both.metrics[name].aggregate() == alone.metrics[name].aggregate()


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("off_policy", [False, True])
def test_extreme_log_probs(off_policy: bool, advantage: float) -> None:
    row = Row(
        new=[-math.inf if off_policy else -1e4, 0.0, -1e-30, -88.0, -1.0],
        old=[-1e-3, -1e4, -200.0, -1.0, -88.0],
        advantage=advantage,
        off_policy=off_policy,
    )
    result = assert_as_expected([row])
    assert np.isfinite(result.gradients[0]).all()
    assert all(math.isfinite(metric.aggregate()) for metric in result.metrics.values())


@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_without_off_policy_rows_it_is_agent_lightnings_loss(delta: float) -> None:
    rows = random_rows(seed=3, count=8)
    for row in rows:
        row.off_policy = False
    ours, theirs = run(rows, delta=delta), run(rows, loss_function=ppo_loss)
    assert ours.loss == theirs.loss
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert mine.tolist() == other.tolist()
    # Their means over a micro-batch's tokens are sums here.
    tokens = sum(row.tokens.sum() for row in rows)
    for name in ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"):
        assert ours.metrics[name].aggregate() == pytest.approx(tokens * theirs.metrics[name].aggregate())


def test_kl_term_is_not_masked() -> None:
    """Two rollouts, of two tokens and of one: a token of the first weighs a quarter, that of the second a half."""
    rows = [
        Row(new=[-1.0, -9.0], old=[-1.0, -9.0], advantage=0.5, off_policy=True, ref=[-1.5, -8.0], weight=1 / 4),
        Row(new=[-0.7], old=[-0.7], advantage=-0.5, ref=[-0.2], weight=1 / 2),
    ]
    result = run(rows, use_kl_loss=True, kl_loss_coef=0.01, kl_loss_type="low_var_kl")
    kl = [math.exp(d) - d - 1 for d in (-0.5, 1.0, 0.5)]
    assert result.loss == pytest.approx(-0.5 + 0.5 + 0.01 * (kl[0] / 4 + kl[1] / 4 + kl[2] / 2), rel=1e-5)
    # The masked token's only gradient is the KL term's: (1 - e^d)·coefficient·weight.
    assert result.gradients[0][1] == pytest.approx(0.01 * (1 - math.e) / 4, rel=1e-4)


def test_the_masked_tokens_of_the_recorded_row_are_handed_over() -> None:
    """Positions in the response: -9 and -5.5 are below ln 0.0067 = -5.006; the observation's -9 is no token of ours."""
    rows = [
        Row(new=[-9.0, -9.0], old=[-1.0, -1.0], advantage=1.0, off_policy=True, prompt=4),
        Row(
            new=[-1.0, -9.0, -9.0, -5.0, -5.5],
            old=[-1.0] * 5,
            advantage=1.0,
            off_policy=True,
            mask=[1, 1, 0, 1, 1],
            recorded=True,
        ),
    ]
    assert run(rows).masked_at == [1, 4]
    assert run(rows, delta=0).masked_at == []
    assert run(rows[:1]).masked_at == []
    rows[1].off_policy = False
    assert run(rows).masked_at == []


def test_rows_on_which_vllm_and_the_trainer_disagree_have_no_gradient() -> None:
    """The mean over a row's own tokens counts, without its sign; tips make off-policy rows differ, and these stay."""
    rows = [
        Row(new=[-1.0, -1.2], old=[-1.3, -1.1], advantage=1.0),  # (0.3 - 0.1) / 2 = 0.1
        Row(new=[-1.0, -9.0, -1.0], old=[-1.4, -1.0, -1.4], advantage=-1.0, mask=[1, 0, 1]),  # 0.4 of two tokens
        Row(new=[-1.4], old=[-1.0], advantage=1.0),  # -0.4
        Row(new=[-1.0], old=[-2.0], advantage=-1.0, off_policy=True),
    ]
    every, limited = run(rows), run(rows, gap_limit=0.2)
    assert [bool((gradient != 0).any()) for gradient in every.gradients] == [True] * 4
    assert [bool((gradient != 0).any()) for gradient in limited.gradients] == [True, False, False, True]
    assert every.metrics["disagreeing_rows"].aggregate() == 0
    assert limited.metrics["disagreeing_rows"].aggregate() == 2
    for kept in (0, 3):
        assert (limited.gradients[kept] == every.gradients[kept]).all()


def test_sums_by_hand() -> None:
    rows = [
        # 3 tokens of an off-policy row, one masked; the observation between them, below δ, is none.
        Row(new=[-1.0, -9.0, -9.0, -2.0], old=[-5.0] * 4, advantage=1.0, off_policy=True, mask=[1, 0, 1, 1]),
        # mean gap (0.1 + 0.3) / 2 = 0.2; the observation's is not counted.
        Row(new=[-1.0, -7.0, -1.0], old=[-1.1, 0.0, -1.3], advantage=1.0, mask=[1, 0, 1]),
        # mean gap |-0.4| = 0.4, and 0.4 - 0.4 = 0: signs cancel within a row, not between rows.
        Row(new=[-1.4], old=[-1.0], advantage=1.0),
        Row(new=[-1.4, -1.0], old=[-1.0, -1.4], advantage=1.0),
        Row(new=[-1.4], old=[-1.0], advantage=1.0, mask=[0]),
    ]
    metrics = run(rows).metrics
    sums = {
        name: metrics[name].aggregate()
        for name in ("off_policy_tokens", "masked_tokens", "compared_rows", "log_ppl_gap")
    }
    assert sums == pytest.approx({"off_policy_tokens": 3, "masked_tokens": 1, "compared_rows": 3, "log_ppl_gap": 0.6})
    assert all(metrics[name].aggregation == AggregationType.SUM for name in sums)


def test_what_stale_off_policy_rows_teach_with_either_old_log_probs() -> None:
    """One state with four actions; the step starts from p, and versions s sampled with tips, at advantage 1.

    With the log-probs of p, tip-free, the logits move by the expectation of A ∇ log p(a), s - p: towards what was done
    with tips, whatever version that was. With their own log-probs an unclipped constant advantage teaches nothing.
    """
    p = np.array([0.4, 0.3, 0.2, 0.1])
    for s in (np.array([0.45, 0.27, 0.19, 0.09]), np.array([0.36, 0.34, 0.19, 0.11])):
        for old, want in ((p, s - p), (s, np.zeros(4))):
            rows = [Row([math.log(p[a])], [math.log(old[a])], advantage=s[a], off_policy=True) for a in range(4)]
            by_log_prob = np.concatenate(run(rows).gradients)  # of the loss, so negative
            np.testing.assert_allclose(-by_log_prob @ (np.eye(4) - p), want, atol=1e-6)
    unlikely = Row([math.log(DELTA) - 0.1], [math.log(DELTA) - 0.1], advantage=1.0, off_policy=True)
    assert run([unlikely]).gradients[0] == [0]  # the mask is what notices staleness
