"""The objective against numbers worked out in numpy, token by token, from the paper's formulas and the KL's."""

import math
from dataclasses import dataclass, field
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

from empo2.recipe.trainer.objective import hybrid_loss, top_kl

LOW, HIGH, DUAL = 0.20, 0.30, 10.0
K = 4  # of a teacher's likeliest tokens
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
    memory: bool = False  # off-policy rows have it anyway
    distilled: bool = False
    teacher: np.ndarray | None = None  # [tokens, K], log-probs of its likeliest tokens
    student: np.ndarray | None = None  # [tokens, K], π_θ's of the same

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
        "first_index": 100 * torch.arange(count),
        "memory": torch.tensor([row.memory or row.off_policy for row in rows]),
        "distilled": torch.tensor([row.distilled for row in rows]),
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
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(leaves), offsets)}
    if any(row.teacher is not None for row in rows):
        width = tensors["response_mask"].shape[1]
        teacher = torch.full((len(rows), width, K), -math.inf)
        students = []
        for i, row in enumerate(rows):
            if row.teacher is not None:
                teacher[i, : row.tokens.sum()] = torch.tensor(row.teacher[row.tokens])
            inside = np.zeros((len(row.new), K)) if row.student is None else row.student
            # At all other positions the engine gives zeros.
            students.append(torch.tensor(np.pad(inside, ((row.prompt - 1, 1), (0, 0))), dtype=torch.float32))
        data["teacher_log_probs"] = teacher
        leaves += [student.requires_grad_() for student in students]
        output["student_log_probs"] = torch.nested.nested_tensor_from_jagged(torch.cat(students), offsets)
    return data, output, leaves


@dataclass
class Result:
    loss: float
    gradients: list[np.ndarray]  # of each row's response tokens
    metrics: dict[str, Any]
    elsewhere: float  # sum of |gradient| at all other positions
    masked_at: list[int] | None  # None of another loss
    students: list[np.ndarray] = field(default_factory=list)  # by the student's log-probs of the teacher's tokens


def run(
    rows: list[Row],
    *,
    delta: float = DELTA,
    gap_limit: float = math.inf,
    distillation: float = 0.0,
    reverse: bool = False,
    loss_function: Any = None,
    **config: Any,
) -> Result:
    data, output, leaves = micro_batch(rows)
    arguments = {"config": actor_config(**config), "model_output": output, "data": data}
    ours = partial(hybrid_loss, mask_threshold=delta, gap_limit=gap_limit, distillation=distillation, reverse=reverse)
    loss, metrics = (loss_function or ours)(**arguments)
    loss.backward()
    responses, elsewhere = [], 0.0
    for leaf, row in zip(leaves, rows, strict=False):
        assert leaf.grad is not None
        before, response, after = leaf.grad.split([row.prompt - 1, len(row.new), 1])
        responses.append(response.numpy())
        elsewhere += float(before.abs().sum() + after.abs().sum())
    students = [leaf.grad for leaf in leaves[len(rows) :]]
    inside = [each[row.prompt - 1 : -1].numpy() for each, row in zip(students, rows, strict=False) if each is not None]
    return Result(loss.item(), responses, metrics, elsewhere, metrics.pop("masked_at", None), inside)


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
        size, prompt, off_policy = (int(generator.integers(*limits)) for limits in ((1, 9), (1, 6), (0, 2)))
        old = generator.uniform(-7, 0, size)
        new = (old + generator.normal(0, 0.4, size)).clip(max=0).tolist()
        mask = [1, *generator.integers(0, 2, size - 1).tolist()]
        rows.append(Row(new, old.tolist(), float(generator.normal()), bool(off_policy), mask, prompt))
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_loss_and_gradient_of_mixed_batches(seed: int) -> None:
    assert_as_expected(random_rows(seed, count=6))


@pytest.mark.parametrize(
    ("advantage", "tip_free", "pushed"),
    [
        # π(a|u) = 0.1, π(a|u, tips) = 0.9. A > 0: of a 0.9 · 1.87 / 9 · (1 - 0.1); the other's ratio, 9, is clipped.
        (1.87, False, 0.168),
        # A < 0: a is clipped; of the other 0.1 · (-1.87) · 9 · (0 - 0.1). Failing tips are imitated, not unlearned.
        (-1.87, False, 0.168),
        # Ratios of 1: A · (0.9 · 0.9 - 0.1 · 0.1).
        (1.87, True, 1.50),
        (-1.87, True, -1.50),
    ],
)
def test_what_an_off_policy_row_does_to_the_logit_of_what_tips_recommend(
    advantage: float, tip_free: bool, pushed: float
) -> None:
    """Two actions, sampled with the tips: each is a row, its advantage times how often it is sampled."""
    policy, sampled = np.array([0.1, 0.9]), np.array([0.9, 0.1])
    old = policy if tip_free else sampled
    rows = [
        Row([math.log(policy[i])], [math.log(old[i])], float(sampled[i] * advantage), off_policy=True) for i in (0, 1)
    ]
    by_log_prob = [-gradient[0] for gradient in run(rows).gradients]  # of the objective, not of the loss
    assert by_log_prob[0] * (1 - policy[0]) - by_log_prob[1] * policy[0] == pytest.approx(pushed, abs=5e-3)


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
    result = assert_as_expected([Row([-1.0], [-1.0 - math.log(ratio)], advantage, off_policy)])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert bool(result.gradients[0][0] != 0) is flows


def test_mask_is_per_token_on_the_current_policy() -> None:
    """The authors' code masks whole rows, by their lowest token, on the tip-conditioned log-prob."""
    low, high = math.log(DELTA) - 0.01, math.log(DELTA) + 0.01
    row = Row([high, low, -0.1, low], [low - 0.1, -0.1, low, low], advantage=1.0, off_policy=True)
    result = assert_as_expected([row])
    assert (result.gradients[0] != 0).tolist() == [True, False, False, False]  # the third is clipped: its ratio is high
    row.old[2] = -0.1
    assert (assert_as_expected([row]).gradients[0] != 0).tolist() == [True, False, True, False]
    row.mask, other = [1, 1, 1, 0], Row(new=[low], old=[low], advantage=1.0)
    assert run([other, row]).masked_at == [101]  # the index of the second row's first token is 100


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("off_policy", [False, True])
def test_extreme_log_probs(off_policy: bool, advantage: float) -> None:
    new = [-math.inf if off_policy else -1e4, 0.0, -1e-30, -88.0, -1.0]
    result = assert_as_expected([Row(new, [-1e-3, -1e4, -200.0, -1.0, -88.0], advantage, off_policy)])
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


def test_sums_of_each_kind_of_row() -> None:
    """Ratios e^0.5 = 1.65 are clipped for A > 0, e^-0.5 = 0.61 for A < 0. Mean gaps of on-policy rows: 0, 0.1, 0.4."""
    rows = [
        Row([-1.0, -9.0, -9.0, -1.0], [-1.5, -9.0, -9.0, -0.5], 1.0, off_policy=True, mask=[1, 1, 0, 1]),
        Row([-1.0, -1.0], [-0.5, -1.5], -1.0, memory=True),
        Row([-1.0, -7.0], [-1.1, 0.0], 1.0, mask=[1, 0]),
        Row([-1.4], [-1.0], 1.0),
        Row([-1.4], [-1.0], 1.0, mask=[0]),
    ]
    for row in rows:
        row.ref, row.weight = [value - 1 for value in row.new], 0.1
    metrics = run(rows, gap_limit=9.0, use_kl_loss=True, kl_loss_coef=0.01, kl_loss_type="low_var_kl").metrics
    assert [metrics[name].aggregate() for name in ("compared_rows", "log_ppl_gap")] == pytest.approx([3, 0.5])
    assert all(metric.aggregation == AggregationType.SUM for metric in metrics.values())
    for kind, want in (
        ("off_policy", [3, 1, 1, 0, 3 / math.e]),  # e^-1 + 1 - 1 a token
        ("with_tips", [2, 1, 0, 0, 2 / math.e]),
        ("without_tips", [2, 0, 0, 0.3, 2 / math.e]),
    ):
        names = ("tokens", "clipped", "masked", "old_kl", "start_kl")
        assert [metrics[f"{name}/{kind}"].aggregate() for name in names] == pytest.approx(want)


def test_the_kl_of_rows_with_tips_alone() -> None:
    """d = -1 at each token: the estimator is e^-1, its gradient 1 - e^-1; a token weighs 0.1, β is 0.5."""
    rows = [Row([-1.0, -1.0], [-1.0, -1.0], 0.0, off_policy, ref=[-2.0, -2.0], weight=0.1, memory=memory)
            for off_policy, memory in ((True, True), (False, True), (False, False))]  # fmt: skip
    loss = partial(hybrid_loss, mask_threshold=DELTA, kl_with_tips=True)
    found = run(rows, loss_function=loss, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="low_var_kl")
    assert found.loss == pytest.approx(0.5 * 0.1 * 2 / math.e)
    assert np.array(found.gradients) == pytest.approx(np.array([[0, 0], [0.05 * (1 - 1 / math.e)] * 2, [0, 0]]))
    assert found.metrics["start_kl/with_tips"].aggregate() == pytest.approx(2 / math.e)
    assert not {"start_kl/off_policy", "start_kl/without_tips"} & found.metrics.keys()


def test_rows_on_which_vllm_and_the_trainer_disagree_have_no_gradient() -> None:
    """The mean over a row's own tokens counts, without its sign; tips make off-policy rows differ, and these stay."""
    rows = [
        Row([-1.0, -1.2], [-1.3, -1.1], 1.0),  # (0.3 - 0.1) / 2 = 0.1
        Row([-1.0, -9.0, -1.0], [-1.4, -1.0, -1.4], -1.0, mask=[1, 0, 1]),  # 0.4 of two tokens
        Row([-1.4], [-1.0], 1.0),  # -0.4
        Row([-1.0], [-2.0], -1.0, off_policy=True),
    ]
    result = run(rows, gap_limit=0.2)
    assert [bool((gradient != 0).any()) for gradient in result.gradients] == [True, False, False, True]
    assert result.metrics["disagreeing_rows"].aggregate() == 2


def buckets(log_probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The probabilities of some tokens, and of all others together."""
    chosen = np.exp(log_probs[tokens])
    return np.append(chosen, 1 - chosen.sum())


@pytest.mark.parametrize("reverse", [False, True])
def test_kl_and_its_gradient_by_the_logits(reverse: bool) -> None:
    """In closed form, for student and teacher over 60 tokens of which the teacher's likeliest 20 are known."""
    generator = np.random.default_rng(int(reverse))
    teacher, logits = generator.normal(0, 2, (2, 7, 60))
    teacher = teacher - np.log(np.exp(teacher).sum(-1, keepdims=True))
    top = np.argsort(-teacher, axis=-1)[:, :20]
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    student = leaf.log_softmax(-1).gather(-1, torch.tensor(top))
    found = top_kl(student, torch.tensor(np.take_along_axis(teacher, top, -1)), reverse=reverse)
    found.sum().backward()
    assert leaf.grad is not None
    for t in range(7):
        of_student = logits[t] - np.log(np.exp(logits[t]).sum())
        p, q = buckets(teacher[t], top[t]), buckets(of_student, top[t])
        kl = (q * np.log(q / p)).sum() if reverse else (p * np.log(p / q)).sum()
        assert found[t].item() == pytest.approx(kl, rel=1e-9)
        of_bucket = np.full(60, 20)
        of_bucket[top[t]] = np.arange(20)
        # dKL/dlogit_j: of the forward KL q_j (1 - p_b/q_b), of the reverse q_j (log(q_b/p_b) - KL), b the bucket of j.
        inner = np.log(q / p) - kl if reverse else 1 - p / q
        np.testing.assert_allclose(leaf.grad[t], np.exp(of_student) * inner[of_bucket], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_kl_of_rounded_and_missing_numbers(reverse: bool) -> None:
    """No teacher: 0. All mass known, by rounding more: finite. Equal: 0 to rounding."""
    none = torch.full((1, 1, K), -math.inf)
    student = torch.log(torch.tensor([[[0.6, 0.3, 0.1, 1e-9]]])).requires_grad_()
    for teacher, kl in ((none, 0.0), (student.detach() + 1e-7, 0.0), (student.detach(), 0.0)):
        found = top_kl(student, teacher, reverse=reverse)
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert found.item() == pytest.approx(kl, abs=1e-5) and gradient.isfinite().all()
    (gradient,) = torch.autograd.grad(top_kl(student, none, reverse=reverse).sum(), student)
    assert not gradient.any()
    sure = torch.log(torch.tensor([[[1.0, 1e-30, 1e-38, 1e-38]]]))
    doubtful = torch.full((1, 1, K), -12.0).requires_grad_()
    found = top_kl(doubtful, sure, reverse=reverse)
    assert found.isfinite().all() and torch.autograd.grad(found.sum(), doubtful)[0].isfinite().all()


@pytest.mark.parametrize("reverse", [False, True])
def test_distilled_rows_have_a_kl_in_the_place_of_the_clipped_term(reverse: bool) -> None:
    """Its weight is that of every term, 1/(M T); tokens of observations and rows that are not distilled have none."""
    generator = np.random.default_rng(3)

    def known(size: int, mass: float) -> np.ndarray:
        return np.log(generator.dirichlet(np.ones(K), size) * mass)

    weights = (1 / (3 * 3), 1 / (3 * 2), 1 / 3)
    rows = [
        Row([-9.0, -9.0, -1.0, -9.0], [-1.0] * 4, 0.0, True, [1, 0, 1, 1], 3, weight=weights[0], distilled=True),
        Row([-9.0, -1.0], [-1.0] * 2, 0.0, True, weight=weights[1]),
        Row([-1.0], [-1.1], 0.5 * weights[2], weight=weights[2]),
    ]
    for row in rows[:2]:
        row.teacher, row.student = known(len(row.new), 0.9), known(len(row.new), 0.7)
    result = run(rows, delta=0.0, distillation=0.4, reverse=reverse)
    student = torch.tensor(rows[0].student, requires_grad=True)
    kl = top_kl(student, torch.tensor(rows[0].teacher), reverse=reverse)[[0, 2, 3]].sum()
    (gradient,) = torch.autograd.grad(kl, student)
    total = kl.item()
    assert result.loss == pytest.approx(0.4 * weights[0] * total - 0.5 * weights[2] * math.exp(0.1), rel=1e-5)
    np.testing.assert_allclose(result.students[0], 0.4 * weights[0] * gradient, rtol=1e-4, atol=1e-7)
    assert not result.students[1].any() and not any(gradient.any() for gradient in result.gradients[:2])
    metrics = {name: result.metrics[name].aggregate() for name in ("distilled_tokens", "distillation_kl")}
    assert metrics == pytest.approx({"distilled_tokens": 3, "distillation_kl": total}, rel=1e-5)
    assert result.masked_at == []
    measured = {name for name in result.metrics if name.endswith("/off_policy")}
    assert measured == {"tokens/off_policy", "old_kl/off_policy"}  # nothing could be clipped or masked
    assert not {"masked/with_tips", "masked/without_tips"} & result.metrics.keys()
