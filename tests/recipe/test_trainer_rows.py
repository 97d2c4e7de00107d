"""Training rows between agent-lightning's adapter and verl's update: exact scores, whole mini-batches, no weightless
row in any number."""

import math
from typing import Any

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import numpy as np
import pytest
import torch
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
from agentlightning.verl.per_rollout_loss import normalize_advantages_by_rollout
from agentlightning.verl.rollout_adapter import RolloutAdapter
from agentlightning.verl.rollout_level_advantage import compute_rollout_level_advantage
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.utils.metric import AggregationType, Metric

from empo2.recipe.config import load_settings
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.trainer.manager import (
    CALL_EVENT,
    MEMORY,
    NO_MEMORY,
    OFF_POLICY,
    ON_POLICY,
    Mode,
    Outcomes,
    prepare_for_training,
)
from empo2.recipe.trainer.rows import exact_rows, weightless_fillers, whole_mini_batches, without_fillers
from empo2.recipe.trainer.trainer import Empo2Trainer, _rename_sums

PROMPT, RESPONSE = 6, 8
ALGORITHM = load_settings("cpu").algorithm


def names(count: int, group: int = 8) -> list[str]:
    """Rollouts of about ``count / group`` groups, none of them alone."""
    return [f"g{i % max(1, round(count / group))}-{i}" for i in range(count)]


def played(returns: dict[str, float], *, prompts: dict[str, int] | None = None) -> list[CompletedRollout]:
    """One-turn rollouts named by their group and number, with replies of different lengths."""
    generator = np.random.default_rng(0)
    rollouts = []
    for number, (name, value) in enumerate(returns.items()):
        prompt = list(range(100, 100 + (prompts or {}).get(name, 3)))
        size = int(generator.integers(1, RESPONSE + 1))
        reply = {"token_ids": list(range(size)), "log_probs": generator.uniform(-4, 0, size).tolist()}
        rollouts.append(
            CompletedRollout(
                rollout_id=name,
                data_id=name.rsplit("-", 1)[0],
                step=1,
                sample_idx_in_step=number,
                enqueue_time=0,
                final_reward=ALGORITHM.return_scale * value,
                triplets=[Triplet(prompt={"token_ids": prompt}, response=reply)],
            )
        )
    return rollouts


def adapted(rollouts: list[CompletedRollout]) -> DataProto:
    adapter = RolloutAdapter(
        max_prompt_length=PROMPT,
        max_response_length=RESPONSE,
        device=torch.device("cpu"),
        pad_token_id=0,
        reward_fillna_value=0.0,
        trace_aggregator_level="trajectory",
    )
    batch, _ = adapter.get_train_data_batch(rollouts)
    return batch


def outcomes_of(returns: dict[str, float], off_policy: tuple[str, ...] = ()) -> Outcomes:
    outcomes = Outcomes(returns=returns, intrinsic=dict.fromkeys(returns, 0.0))
    outcomes.modes = {
        name: Mode(MEMORY, OFF_POLICY) if name in off_policy else Mode(NO_MEMORY, ON_POLICY) for name in returns
    }
    return outcomes


def rows_of(count: int, group: int = 8) -> DataProto:
    returns = {name: float((7 * i) % 11 - 40) for i, name in enumerate(names(count, group))}
    return exact_rows(adapted(played(returns)), outcomes_of(returns), ALGORITHM)


def advantages(batch: DataProto) -> DataProto:
    """What ``_train_step`` does between the rollouts and the update, floors included."""
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["data_id_list"]
    batch, _ = compute_rollout_level_advantage(
        batch, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=8, norm_adv_by_std_in_grpo=True
    )
    return batch


def normalised(batch: DataProto) -> DataProto:
    batch.batch["advantages"] = normalize_advantages_by_rollout(
        batch.batch["advantages"],
        batch.batch["response_mask"],
        batch.non_tensor_batch["rollout_id_list"],
        num_trained_rows=len(batch),
    )
    return batch


# Rows


def test_scores_are_exact() -> None:
    """bfloat16, the adapter's, has three digits: returns that differ by little would have no advantage at all."""
    returns = {"g-0": 67.0, "g-1": 67.1, "h-2": -100.0, "h-3": 33.3}
    outcomes = outcomes_of(returns)
    outcomes.intrinsic = {"g-0": 1.5, "g-1": 1.5, "h-2": 0.25, "h-3": 3.0}
    algorithm = ALGORITHM.model_copy(update={"return_scale": 0.01, "intrinsic_coefficient": 2.0})
    batch = adapted(played(returns))
    rounded = batch.batch["token_level_scores"].clone()
    rows = exact_rows(batch, outcomes, algorithm)
    scores = rows.batch["token_level_scores"]
    assert scores.dtype == torch.float32
    assert scores.sum(-1).tolist() == pytest.approx([0.70, 0.701, -0.995, 0.393], abs=1e-6)
    assert rounded.sum(-1).dtype == torch.bfloat16
    # Each stands on its row's last token, as the adapter put it.
    assert (scores != 0).tolist() == (rounded != 0).tolist()
    assert (scores != 0).sum(-1).tolist() == [1] * 4


def test_flag_of_each_row() -> None:
    returns = {"g-0": 1.0, "g-1": 2.0, "h-2": 3.0, "h-3": 4.0}
    rows = exact_rows(adapted(played(returns)), outcomes_of(returns, off_policy=("h-2", "h-3")), ALGORITHM)
    assert rows.non_tensor_batch["rollout_id_list"].tolist() == list(returns)
    assert rows.batch["off_policy"].tolist() == [False, False, True, True]


def test_overlong_rows_are_left_out() -> None:
    returns = {"g-0": 1.0, "g-1": 2.0, "g-2": 3.0}
    batch = adapted(played(returns, prompts={"g-1": PROMPT + 1, "g-2": PROMPT}))
    rows = exact_rows(batch, outcomes_of(returns), ALGORITHM)
    assert rows.non_tensor_batch["rollout_id_list"].tolist() == ["g-0", "g-2"]
    assert not rows.batch["is_drop_mask"].any()


def test_rollout_left_alone_by_overlong_rows_is_left_out() -> None:
    """A group of one gets its raw score as advantage."""
    returns = {"g-0": 1.0, "g-1": 2.0, "h-2": 3.0, "h-3": 4.0}
    batch = adapted(played(returns, prompts={"g-1": PROMPT + 1}))
    rows = exact_rows(batch, outcomes_of(returns), ALGORITHM)
    assert rows.non_tensor_batch["rollout_id_list"].tolist() == ["h-2", "h-3"]


def test_nothing_but_overlong_rows() -> None:
    returns = {"g-0": 1.0, "g-1": 2.0}
    batch = adapted(played(returns, prompts={"g-0": PROMPT + 1, "g-1": PROMPT + 1}))
    with pytest.raises(NoUsableRollouts, match=r"model\.max_prompt_tokens"):
        exact_rows(batch, outcomes_of(returns), ALGORITHM)


def test_off_policy_episode_is_one_row() -> None:
    """Three turns whose tips are the tokens from 900 on: one tip-free prompt, vLLM's log-probs taken with the tips."""
    turns = [
        # sent, without tips, reply, log-probs
        ([1, 900, 2], [1, 2], [10, 11], [-0.1, -0.2]),
        ([1, 900, 2, 10, 11, 901, 3], [1, 2, 10, 11, 3], [12], [-0.3]),
        ([1, 900, 2, 10, 11, 901, 3, 12, 4], [1, 2, 10, 11, 3, 12, 4], [13], [-0.4]),
    ]

    def episode(name: str, update: str, value: float) -> CompletedRollout:
        tag = {"rollout_mode": MEMORY, "update_mode": update, "scope": "s"}
        calls = [{"prompt_token_ids": sent, "tip_free_prompt_token_ids": free} for sent, free, *_ in turns]
        rollout = CompletedRollout(
            rollout_id=name,
            data_id=name[0],
            step=1,
            sample_idx_in_step=0,
            enqueue_time=0,
            final_reward=value,
            triplets=[
                Triplet(prompt={"token_ids": sent}, response={"token_ids": list(reply), "log_probs": list(log_probs)})
                for sent, _, reply, log_probs in turns
            ],
            events=[{"event_type": CALL_EVENT, "data": call} for call in calls],
            metadata={"empo2": tag},
        )
        return prepare_for_training(rollout)[0]

    returns = {"g1": 1.0, "g2": 2.0, "h1": 3.0, "h2": 4.0}
    episodes = [episode(name, OFF_POLICY if name[0] == "g" else ON_POLICY, value) for name, value in returns.items()]
    rows = exact_rows(adapted(episodes), outcomes_of(returns, off_policy=("g1", "g2")), ALGORITHM)
    assert rows.non_tensor_batch["rollout_id_list"].tolist() == list(returns)
    assert rows.batch["off_policy"].tolist() == [True, True, False, False]
    ids, mask = rows.batch["input_ids"], rows.batch["attention_mask"].bool()
    assert ids[0][mask[0]].tolist() == [1, 2, 10, 11, 3, 12, 4, 13]
    assert ids[2][mask[2]].tolist() == [1, 900, 2, 10, 11, 901, 3, 12, 4, 13]
    assert rows.batch["response_mask"][0].tolist() == [1, 1, 0, 1, 0, 1, 0, 0]
    assert rows.batch["response_mask"][2].tolist() == [1, 1, 0, 0, 1, 0, 1, 0]
    for row in range(4):
        trained = rows.batch["response_mask"][row].bool()
        assert rows.batch["responses"][row][trained].tolist() == [10, 11, 12, 13]
        assert rows.batch["rollout_log_probs"][row][trained].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])


# Mini-batches


@pytest.mark.parametrize(
    ("count", "group", "gpus", "planned_tasks", "filled", "tasks"),
    [
        (16, 8, 1, 2, 16, 2),  # nothing lost, nothing filled
        (15, 8, 1, 2, 16, 2),  # one rollout failed
        (9, 8, 1, 2, 16, 2),
        (8, 8, 1, 2, 8, 1),  # a whole group failed: a smaller mini-batch rather than eight fillers
        (2, 8, 1, 2, 8, 1),
        (17, 8, 1, 2, 24, 3),  # an episode came in two rows: still one update, as planned
        (25, 8, 1, 2, 32, 2),  # so many that they are two updates
        (33, 8, 1, 1, 48, 2),  # four updates were planned; of 16 rows each, the fourth would be fillers alone
        (128, 8, 8, 16, 128, 16),  # the paper's step
        (127, 8, 8, 16, 128, 16),
        (7, 4, 1, 2, 8, 2),  # profile cpu
        (9, 4, 8, 4, 16, 4),  # a group of four over eight GPUs: whole eights
        (64, 8, 1, 2, 64, 2),  # four updates
        (61, 8, 1, 2, 64, 2),
    ],
)
def test_whole_mini_batches(count: int, group: int, gpus: int, planned_tasks: int, filled: int, tasks: int) -> None:
    rows = rows_of(count, group)
    batch, size = whole_mini_batches(rows, group=group, gpus=gpus, planned_tasks=planned_tasks)
    assert (len(batch), size) == (filled, tasks)
    assert batch.batch["filler"].tolist() == [False] * count + [True] * (filled - count)
    # agent-lightning's own arithmetic then drops nothing (_train_step, "mini_bs"), and verl splits evenly.
    mini_batch = size * group
    assert len(batch) // mini_batch * mini_batch == len(batch)
    assert mini_batch % gpus == 0


@pytest.mark.parametrize(("group", "gpus", "planned_tasks"), [(8, 1, 2), (4, 1, 2), (8, 8, 1), (6, 4, 3)])
def test_no_row_is_lost_whatever_the_count(group: int, gpus: int, planned_tasks: int) -> None:
    for count in range(1, 70):
        names = np.arange(count).astype(str)
        tensors = {"response_mask": torch.ones(count, 2), "token_level_scores": torch.ones(count, 2)}
        batch = DataProto(
            batch=TensorDict(tensors, batch_size=count),
            non_tensor_batch={"rollout_id_list": names, "data_id_list": names},
        )
        batch, size = whole_mini_batches(batch, group=group, gpus=gpus, planned_tasks=planned_tasks)
        assert len(batch) % (size * group) == 0
        assert size * group % gpus == 0
        assert int((~batch.batch["filler"]).sum()) == count
        # No optimizer step on fillers alone: AdamW's momentum would move the weights all the same.
        assert (~batch.batch["filler"]).view(-1, size * group).any(-1).all()


def test_fillers_are_nobodys_group() -> None:
    rows = rows_of(13)
    batch, _ = whole_mini_batches(rows, group=8, gpus=1, planned_tasks=2)
    fillers = batch[13:]
    assert fillers.batch["response_mask"].sum(-1).tolist() == [1, 1, 1]
    assert not fillers.batch["token_level_scores"].any()
    for key in ("rollout_id_list", "data_id_list"):
        names = batch.non_tensor_batch[key].tolist()
        assert len(set(names[13:])) == 3
        assert not set(names[13:]) & set(names[:13])


def test_one_failed_rollout_changes_nothing_but_its_own_absence() -> None:
    """The 15 rows' advantages are those of 15 rows alone: group statistics and 1/N know nothing of the filler."""
    rows = rows_of(15)
    alone = normalised(advantages(rows_of(15)))
    batch, _ = whole_mini_batches(rows, group=8, gpus=1, planned_tasks=2)
    batch = normalised(advantages(batch))
    assert len(batch) == 16
    update = weightless_fillers(batch)
    torch.testing.assert_close(update.batch["advantages"][:15], alone.batch["advantages"])
    assert update.batch["response_mask"][:15].tolist() == alone.batch["response_mask"].tolist()
    assert not update.batch["response_mask"][15:].any()
    assert not update.batch["advantages"][15:].any()
    assert "filler" not in update.batch
    # The batch that metrics are made from is left as it was.
    assert batch.batch["response_mask"][15].sum() == 1
    assert "filler" in batch.batch


def test_denominator_by_hand() -> None:
    """Five rows filled up to eight: A / (tokens of the rollout * 5 rows), never * 8."""
    returns = {"g-0": 10.0, "g-1": 30.0, "h-2": 5.0, "h-3": 7.0, "h-4": 9.0}
    rows = exact_rows(adapted(played(returns)), outcomes_of(returns), ALGORITHM)
    batch, tasks = whole_mini_batches(rows, group=4, gpus=1, planned_tasks=2)
    assert (len(batch), tasks) == (8, 2)
    update = weightless_fillers(normalised(advantages(batch)))
    tokens = update.batch["response_mask"].sum(-1)[:5].tolist()
    # Group g: deviation of 0.1 and 0.3 is 0.1·√2; group h: 0.02.
    g, h = 0.1 / (0.1 * math.sqrt(2) + 1e-6), 0.02 / (0.02 + 1e-6)
    shares = [value / (count * 5) for value, count in zip([-g, g, -h, 0.0, h], tokens, strict=True)]
    assert update.batch["advantages"][:5, 0].tolist() == pytest.approx(shares, rel=1e-4, abs=1e-7)


def test_fillers_are_in_no_metric() -> None:
    rows = rows_of(13)
    alone = advantages(rows_of(13))
    want = compute_data_metrics(batch=alone, use_critic=False)
    batch, _ = whole_mini_batches(rows, group=8, gpus=1, planned_tasks=2)
    batch = normalised(advantages(batch))
    batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
    real, metrics = without_fillers(batch)
    assert len(real) == 13
    assert len(real.meta_info["global_token_num"]) == 13
    assert {key: metrics[key] for key in want} == pytest.approx(want, rel=1e-5, nan_ok=True)
    assert metrics["training/n_groups"] == 2
    assert metrics["training/n_zero_adv_groups"] == 0
    for name in (
        "training/n_sample_collected",
        "training/n_sample_trained",
        "critic/n_transition_after_dropping",
        "training/rollout_level_advantage/n_rows",
        "training/rollout_level_advantage/n_rollouts",
    ):
        assert metrics[name] == 13, name


# The trainer's own overrides, without Ray


def trainer_of(count: int, monkeypatch: pytest.MonkeyPatch) -> Empo2Trainer:
    """A trainer whose agent-lightning returns ``count`` rows, and whose verl notes what it is given to train on."""
    trainer: Any = object.__new__(Empo2Trainer)
    trainer.config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"ppo_mini_batch_size": 2, "shuffle": False}}}
    )
    trainer._planned_mini_batch_tasks = 2
    trainer._settings = load_settings("cpu", ["algorithm.rollouts_per_task=8"])
    trainer.resource_pool_manager = type("Pool", (), {"get_n_gpus": lambda self: 1})()
    returns = {name: float(i) for i, name in enumerate(names(count))}
    trainer._manager = type("Manager", (), {"outcomes": outcomes_of(returns), "gateway_metrics": {"empo2/calls": 3}})()

    def rollout(self: Any, gen_batch: DataProto, is_train: bool) -> tuple[DataProto, dict[str, Any]]:
        return adapted(played(returns)), {"training/n_unmerged_rollouts": 0}

    def update(self: Any, batch: DataProto) -> DataProto:
        trainer.trained = batch
        sums = {
            "off_policy_tokens": [8.0, 0.0],
            "masked_tokens": [2.0, 0.0],
            "compared_rows": [4],
            "log_ppl_gap": [1.0],
        }
        metrics = {f"actor/{name}": values for name, values in sums.items()}
        return DataProto.from_single_dict(data={}, meta_info={"metrics": metrics})

    monkeypatch.setattr(AgentLightningRayPPOTrainer, "_rollout", rollout)
    monkeypatch.setattr(AgentLightningRayPPOTrainer, "_update_actor", update)
    return trainer


@pytest.mark.parametrize(("count", "filled", "tasks"), [(15, 16, 2), (17, 24, 3), (25, 32, 2)])
def test_trainer_sizes_the_step(count: int, filled: int, tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(count, monkeypatch)
    batch, metrics = trainer._rollout(DataProto(), is_train=True)
    assert len(batch) == filled
    assert trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size == tasks
    assert metrics["empo2/overlong_rows"] == metrics["empo2/off_policy_rows"] == 0
    assert metrics["empo2/calls"] == 3
    # The next step starts from the plan, not from this step's size.
    trainer._rollout(DataProto(), is_train=True)
    assert trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size == tasks


def test_trainer_updates_on_real_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = trainer_of(15, monkeypatch)
    batch, _ = trainer._rollout(DataProto(), is_train=True)
    batch = normalised(advantages(batch))
    output = trainer._update_actor(batch)
    assert not trainer.trained.batch["response_mask"][15].any()
    assert not trainer.trained.batch["advantages"][15].any()
    assert "filler" not in trainer.trained.batch
    assert "off_policy" in trainer.trained.batch
    assert output.meta_info["metrics"] == {
        "empo2/masked_token_fraction": [0.25],
        "rollout_corr/log_ppl_abs_diff": [0.25],
    }


def test_old_log_probs_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(16, monkeypatch)
    batch, _ = trainer._rollout(DataProto(), is_train=True)
    old, flops = trainer._compute_old_log_prob(batch)
    assert flops == 0
    assert old.batch["old_log_probs"].tolist() == batch.batch["rollout_log_probs"].tolist()
    assert (batch.batch["rollout_log_probs"][batch.batch["response_mask"] == 1] < 0).all()


def test_sums_become_fractions() -> None:
    """Over micro-batches and mini-batches: a mean of fractions would weigh a masked token by its neighbours' number."""

    def total(*values: float) -> float:
        metric = Metric(AggregationType.SUM)
        metric.extend(list(values))
        return metric.aggregate()

    metrics = {
        "actor/pg_loss": 0.5,
        "actor/off_policy_tokens": [total(10, 0), total(30)],
        "actor/masked_tokens": [total(1, 0), total(3)],
        "actor/compared_rows": [total(0, 1), total(0)],
        "actor/log_ppl_gap": [total(0, 0.2), total(0)],
    }
    _rename_sums(metrics)
    assert metrics == {
        "actor/pg_loss": 0.5,
        "empo2/masked_token_fraction": [pytest.approx(0.1)],
        "rollout_corr/log_ppl_abs_diff": [pytest.approx(0.2)],
    }


def test_nothing_to_compare_in_an_off_policy_step() -> None:
    metrics = {
        f"actor/{name}": [0.0] for name in ("off_policy_tokens", "masked_tokens", "compared_rows", "log_ppl_gap")
    }
    _rename_sums(metrics)
    assert metrics == {"empo2/masked_token_fraction": [0.0]}
