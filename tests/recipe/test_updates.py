"""A training step's updates against the objective in numpy, through verl's own cutting into micro-batches."""

from dataclasses import dataclass, field, replace
from typing import Any

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import numpy as np
import pytest
import torch
from agentlightning.verl.rollout_level_advantage import compute_rollout_level_advantage
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.padding import left_right_2_no_padding

from empo2.recipe.trainer.objective import hybrid_loss
from empo2.recipe.trainer.updates import lay_out, plan_updates, planned_batch

from .test_objective import DELTA, Row, actor_config, tensors_of
from .test_objective import expected as clipped_terms

PROMPT, RESPONSE = 4, 7
BETA, LAMBDA = 0.05, 0.01  # of the KL term and the entropy bonus


@dataclass
class Rollout:
    group: str
    score: float
    rows: list[Row]

    @property
    def tokens(self) -> int:
        return sum(int(row.tokens.sum()) for row in self.rows)


def rollouts_of(seed: int, groups: int, *, split: bool) -> list[Rollout]:
    """Groups of two to four rollouts; with ``split`` in one to five rows each."""
    generator = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        off_policy = bool(generator.integers(0, 2))
        for number in range(generator.integers(2, 5)):
            rows = []
            for _ in range(generator.integers(1, 6) if split else 1):
                mask = [*generator.integers(0, 2, generator.integers(0, RESPONSE)).tolist(), 1]
                old = generator.uniform(-7, 0, len(mask))
                new, ref = ((old + generator.normal(0, 0.4, len(mask))).clip(max=0).tolist() for _ in range(2))
                rows.append(Row(new, old.tolist(), 0.0, off_policy, mask, 1 + number % PROMPT, ref))
            made.append(Rollout(f"g{group}", float(generator.normal()), rows))
    return made


def batch_of(rollouts: list[Rollout]) -> DataProto:
    """The rows of a step, with agent-lightning's own advantages."""
    rows = [row for rollout in rollouts for row in rollout.rows]
    rewards = torch.zeros(len(rows), RESPONSE)
    for number, score in enumerate(rollout.score for rollout in rollouts for _ in rollout.rows):
        rewards[number, len(rows[number].new) - 1] = score
    names = np.array([str(i) for i, rollout in enumerate(rollouts) for _ in rollout.rows])
    groups = np.array(group_of(rollouts))
    tensors = tensors_of(rows, PROMPT, RESPONSE) | {"token_level_rewards": rewards, "row": torch.arange(len(rows))}
    batch = DataProto(
        batch=TensorDict(tensors, batch_size=len(rows)),
        non_tensor_batch={"rollout_id_list": names, "data_id_list": groups, "uid": groups},
        meta_info={"temperature": 1.0, "global_token_num": tensors["attention_mask"].sum(-1).tolist()},
    )
    batch, _ = compute_rollout_level_advantage(
        batch, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True
    )
    return batch


def group_of(rollouts: list[Rollout]) -> list[str]:
    return [rollout.group for rollout in rollouts for _ in rollout.rows]


@dataclass
class Update:
    """One optimiser step: its real rows, its loss, and the gradient by log π_θ of each row."""

    rows: list[int] = field(default_factory=list)
    loss: float = 0.0
    gradients: dict[int, np.ndarray] = field(default_factory=dict)


def worker_updates(
    batch: DataProto, log_probs: list[list[float]], ranks: int, micro: int, updates: int, other_terms: bool = True
) -> list[Update]:
    """What verl's ``train_mini_batch`` and FSDP do with the planned batch, the model being a table of log-probs."""
    planned, size = planned_batch(batch, updates=updates, ranks=ranks, micro_batch=micro, other_terms=other_terms)
    rows_of_pass = planned.meta_info["micro_batch_size_per_gpu"]
    assert rows_of_pass <= micro and size % (ranks * rows_of_pass) == 0 and len(planned) % size == 0
    config = actor_config(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=micro,
        use_kl_loss=other_terms,
        kl_loss_coef=BETA,
        kl_loss_type="low_var_kl",
        entropy_coeff=LAMBDA if other_terms else 0.0,
    )
    done = [Update() for _ in range(len(planned) // size)]
    lengths = planned.batch["attention_mask"].sum(-1)
    response_lengths = planned.batch["attention_mask"][:, PROMPT:].sum(-1)
    planned.batch["length"], planned.batch["response_length"] = lengths, response_lengths
    data = left_right_2_no_padding(planned.to_tensordict())
    per_rank = size // ranks
    for part in tensordict_utils.chunk_tensordict(data, ranks):
        for update, mini in zip(done, tensordict_utils.chunk_tensordict(part, len(part) // per_rank), strict=True):
            tensordict_utils.assign_non_tensor(mini, use_dynamic_bsz=False)
            for micro_batch in prepare_micro_batches(mini)[0]:
                tensordict_utils.assign_non_tensor(micro_batch, dp_size=ranks, batch_num_tokens=1, global_batch_size=1)
                one_micro_batch(update, micro_batch, config, log_probs, ranks)
    return done


def one_micro_batch(update: Update, data: TensorDict, config: Any, log_probs: list[list[float]], ranks: int) -> None:
    leaves, real = [], []
    for i in range(len(data)):
        row, length, answer = int(data["row"][i]), int(data["length"][i]), int(data["response_length"][i])
        filler = not bool(data["response_mask"][i].any())
        values = [-3.3] * answer if filler else log_probs[row]
        assert len(values) == answer and (not filler or (length, answer) == (2, 1))
        leaves.append(torch.tensor([-3.3] * (length - answer - 1) + values + [-3.3], requires_grad=True))
        real.append(None if filler else (row, length - answer - 1, answer))
    offsets = torch.tensor([0, *np.cumsum([len(leaf) for leaf in leaves])])
    log_prob = torch.cat(leaves)
    entropy = torch.full_like(log_prob, 0.7)
    named = {"log_probs": log_prob, "entropy": entropy}
    output = {name: torch.nested.nested_tensor_from_jagged(each, offsets) for name, each in named.items()}
    loss, metrics = hybrid_loss(config, output, data, mask_threshold=DELTA)
    assert len(metrics.pop("masked_at")) == metrics["masked/off_policy"].aggregate()
    loss.backward()
    update.loss += loss.item() / ranks  # FSDP's mean over the ranks
    for leaf, place in zip(leaves, real, strict=True):
        assert leaf.grad is not None
        if place is None:
            assert not leaf.grad.any()
            continue
        row, start, answer = place
        update.rows.append(row)
        update.gradients[row] = (leaf.grad[start : start + answer] / ranks).numpy()
        assert not leaf.grad[:start].any() and not leaf.grad[start + answer :].any()


def expected(
    rollouts: list[Rollout], everyone: list[Rollout], other_terms: bool = True
) -> tuple[float, list[list[np.ndarray]]]:
    """(1/M) Σ_i (1/T_i) Σ_t [-1[...] min(rA, clip(r)A) + β KL - λ H], and its gradient by log π_θ."""
    loss, gradients = 0.0, []
    beta, lambda_ = (BETA, LAMBDA) if other_terms else (0.0, 0.0)
    for rollout in rollouts:
        group = [other.score for other in everyone if other.group == rollout.group]
        a = (rollout.score - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        weight = 1 / (len(rollouts) * rollout.tokens)
        rows = [replace(row, advantage=weight * a) for row in rollout.rows]
        clipped, of_rows = clipped_terms(rows)
        loss += clipped
        for gradient, row in zip(of_rows, rows, strict=True):
            gap = (np.array(row.ref) - row.new)[row.tokens]
            loss += weight * (beta * (np.exp(gap) - gap - 1) - lambda_ * 0.7).sum()
            gradient[row.tokens] += weight * beta * (1 - np.exp(gap))
        gradients.append(of_rows)
    return float(loss), gradients


def places_of(rollouts: list[Rollout]) -> tuple[list[list[int]], list[list[float]]]:
    """The numbers of each rollout's rows, and the log-probs of all rows."""
    numbers = iter(range(10_000))
    places = [[next(numbers) for _ in rollout.rows] for rollout in rollouts]
    return places, [row.new for rollout in rollouts for row in rollout.rows]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("updates", [1, 2, 3, 7])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 3), (2, 1), (4, 2)])
def test_loss_and_gradient_of_each_update(split: bool, updates: int, ranks: int, micro: int) -> None:
    rollouts = rollouts_of(seed=updates + 10 * split, groups=7, split=split)
    places, flat = places_of(rollouts)
    done = worker_updates(batch_of(rollouts), flat, ranks, micro, updates)
    assert len(done) == updates
    assert sorted(row for update in done for row in update.rows) == list(range(len(flat)))
    for update in done:
        members = [i for i, rows in enumerate(places) if set(rows) & set(update.rows)]
        assert all(set(places[i]) <= set(update.rows) for i in members), "a rollout's rows stay together"
        groups = {rollouts[i].group for i in members}
        assert members == [i for i, rollout in enumerate(rollouts) if rollout.group in groups], "groups stay whole"
        loss, gradients = expected([rollouts[i] for i in members], rollouts)
        assert update.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
        for i, of_rows in zip(members, gradients, strict=True):
            for place, gradient in zip(places[i], of_rows, strict=True):
                np.testing.assert_allclose(update.gradients[place], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 3)])
def test_rows_without_gradient_cost_no_pass_and_still_count(ranks: int, micro: int) -> None:
    """Without KL and entropy, groups of equal scores are left out; M still counts their rollouts."""
    rollouts = rollouts_of(seed=4, groups=6, split=True)
    equal = {"g1", "g2", "g4"}
    for rollout in rollouts:
        rollout.score = 0.5 if rollout.group in equal else rollout.score
    places, flat = places_of(rollouts)
    (update,) = worker_updates(batch_of(rollouts), flat, ranks, micro, updates=1, other_terms=False)
    loss, gradients = expected(rollouts, rollouts, other_terms=False)
    assert update.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    learning = []
    for rollout, rows, of_rows in zip(rollouts, places, gradients, strict=True):
        if rollout.group in equal:
            assert not any(gradient.any() for gradient in of_rows)
            continue
        learning += rows
        for row, gradient in zip(rows, of_rows, strict=True):
            np.testing.assert_allclose(update.gradients[row], gradient, rtol=1e-3, atol=1e-6)
    assert sorted(update.rows) == learning
    flat_rollouts = [replace(rollout, score=0.5) for rollout in rollouts]
    done = worker_updates(batch_of(flat_rollouts), flat, ranks, micro, updates=2, other_terms=False)
    assert [len(update.rows) for update in done] == [1, 1]  # an update keeps one row


@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_update_keeps_an_on_policy_row_to_compare_vllm_with_the_trainer(frozen: bool) -> None:
    """Near the end all groups with tips succeed alike, and only off-policy ones have a gradient."""
    rollouts = rollouts_of(seed=4, groups=6, split=True)
    off = {"g0", "g3"}
    for rollout in rollouts:
        rollout.score = rollout.score if rollout.group in off else 0.5
        for row in rollout.rows:
            row.off_policy = rollout.group in off
    of_off, of_on = (
        [i for i, of in enumerate(group_of(rollouts)) if (of in off) == chosen] for chosen in (True, False)
    )
    planned, _ = planned_batch(batch_of(rollouts), updates=1, ranks=1, micro_batch=1, other_terms=False, frozen=frozen)
    rows = sorted(planned.batch["row"].tolist())
    assert set(rows) - set(of_on) == (set() if frozen else set(of_off))
    assert len(set(rows) & set(of_on)) == 1 and len(rows) == len(set(rows))


def test_distilled_rows_are_kept_though_their_advantages_are_zero() -> None:
    """All with tips succeed, and teach what the policy does not do without: these groups must not be left out."""
    rollouts = rollouts_of(seed=4, groups=6, split=True)
    for rollout in rollouts:
        rollout.score = 0.5
        for row in rollout.rows:
            row.distilled = rollout.group == "g3"
    rows = [(row, 1 / (len(rollouts) * rollout.tokens)) for rollout in rollouts for row in rollout.rows]
    held = torch.tensor([rollout.group == "g5" for rollout in rollouts for _ in rollout.rows])  # has a KL term
    batch, _ = planned_batch(batch_of(rollouts), updates=1, ranks=1, micro_batch=1, other_terms=held)
    found = dict(zip(batch.batch["row"].tolist(), batch.batch["token_weight"].tolist(), strict=True))
    kept = {number: weight for number, (row, weight) in enumerate(rows) if row.distilled or held[number]}
    assert found == pytest.approx(kept)
    assert len(found) == len(batch)


def test_with_a_learning_rate_of_zero_an_update_has_one_row() -> None:
    batch = batch_of(rollouts_of(seed=4, groups=6, split=True))
    planned, size = planned_batch(batch, updates=2, ranks=1, micro_batch=1, other_terms=True, frozen=True)
    assert (len(planned), size) == (2, 1) < (len(batch), len(batch))


@pytest.mark.parametrize(
    ("sizes", "updates", "rows"),
    [
        ([8, 1, 1, 8, 2, 7], 3, [9, 9, 9]),
        ([8] * 16, 5, [24, 24, 24, 24, 32]),
        ([8] * 3, 16, [8] * 3),  # no update without a group
    ],
)
def test_updates_get_whole_groups_and_about_as_many_rows(sizes: list[int], updates: int, rows: list[int]) -> None:
    groups = [f"g{group}" for group, size in enumerate(sizes) for _ in range(size)]
    plan = plan_updates(groups, updates)
    assert sorted(row for rows in plan for row in rows) == [*range(len(groups))]
    assert sorted(map(len, plan)) == rows
    of_updates = [{groups[row] for row in rows} for rows in plan]
    assert sum(map(len, of_updates)) == len(sizes) and max(map(len, of_updates)) - min(map(len, of_updates)) <= 1


def test_ranks_share_an_updates_tokens() -> None:
    tokens = [1000, 10, 10, 10, 500, 500, 400, 600]
    laid_out, _ = lay_out([[0, 1, 2, 3], [4, 5, 6, 7]], tokens, ranks=2, micro_batch=1)
    order = np.array(laid_out).reshape(2, 2, 2)
    # rank, update, row
    assert [set(order[:, update].flatten().tolist()) for update in range(2)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert [sum(tokens[row] for row in order[rank, 1]) for rank in range(2)] == [1000, 1000]


@pytest.mark.parametrize(("rows", "rows_of_pass", "slots"), [(1, 1, 1), (4, 4, 4), (5, 3, 6), (9, 3, 9), (13, 4, 16)])
def test_a_pass_has_fewer_rows_where_this_saves_fillers(rows: int, rows_of_pass: int, slots: int) -> None:
    order, found = lay_out([[*range(rows)]], [10] * rows, ranks=1, micro_batch=4)
    assert (found, len(order)) == (rows_of_pass, slots)
