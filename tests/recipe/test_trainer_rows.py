"""Training rows between agent-lightning's adapter and verl's update, and the training step without Ray."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import numpy as np
import pytest
import torch
from agentlightning.verl.agl_rollout_manager import CompletedRollout, EnqueuedRollout
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler  # verl's
from verl import DataProto
from verl.utils import tensordict_utils
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from empo2.recipe import preemption
from empo2.recipe.config import load_settings
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.protocol import Mode
from empo2.recipe.rollout_log import read_calls, read_rollouts, write_rollouts
from empo2.recipe.run_folder import complete_checkpoints, last_checkpoint, step_of
from empo2.recipe.trainer.advantages import rollout_advantages, worth_imitating
from empo2.recipe.trainer.passes import old_log_probs, reference_log_probs, rows_with_kl
from empo2.recipe.trainer.replay import Replay
from empo2.recipe.trainer.rows import add_masks, distill, set_advantages
from empo2.recipe.trainer.shown_rollouts import RunRecords, call_rows, episode_record
from empo2.recipe.trainer.step_results import DroppedRollout, StepResults
from empo2.recipe.trainer.trainer import Empo2Trainer

from .rollout_events import adapted, recorded, request, rollout_of

PROMPT, RESPONSE = 6, 8
ALGORITHM = load_settings("cpu").algorithm
REPLAY = ("algorithm.off_policy_loss=distillation", "algorithm.replay_per_task=1")
NO_MEMORY, ON_POLICY, OFF_POLICY = Mode.of(memory=False), Mode.of(memory=True), Mode.of(memory=True, off_policy=True)


def played(returns: dict[str, float], mode: Mode | None = None, states: str = "") -> list[CompletedRollout]:
    """One-turn rollouts named by their group and number, with replies of different lengths, begun in these states."""
    generator = np.random.default_rng(0)
    rollouts = []
    for number, (name, value) in enumerate(returns.items()):
        size = int(generator.integers(1, RESPONSE + 1))
        prompt = [100, 101, 102]
        events = [
            request(prompt, range(size), generator.uniform(-4, 0, size).tolist()),
            recorded(prompt, tip_free_prompt_token_ids=prompt, observation=states[number : number + 1]),
        ]
        group, index = name.split("-")
        own = {"data_id": group, "sample_idx_in_step": int(index), "final_reward": value}
        rollouts.append(rollout_of(name, events, mode, **own))
    return rollouts


def rows_of(rollouts: list[CompletedRollout]) -> tuple[Any, StepResults]:
    """The rows of a step with their advantages."""
    results = StepResults()
    batch, _ = adapted([results.train(rollout) for rollout in rollouts], PROMPT, RESPONSE)
    set_advantages(batch, results.kept, rollout_advantages(results.kept, ALGORITHM))
    return batch, results


WORDS = SimpleNamespace(decode=lambda ids: "".join(f"{token} " for token in ids))  # of numbers


def test_the_record_of_a_step_tells_what_was_trained_and_masked() -> None:
    """Of two groups with an advantage the off-policy one; the update says which of its tokens it masked."""
    rollouts = [*played({"g-0": 1.0, "g-1": 2.0}), *played({"h-2": 3.0, "h-3": 4.0}, OFF_POLICY)]
    rollouts[2].input = {"room": "den", "api_key": "hush-hush"}
    rollouts[2].events[1]["data"]["tip_ids"] = [7, 5]
    batch, results = rows_of(rollouts)
    assert batch.batch["off_policy"].tolist() == [False, False, True, True]
    size = int(batch.batch["response_mask"][2].sum())
    assert size >= 3  # of h-2's reply, which played() draws
    masked, known = torch.zeros(4, RESPONSE, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    masked[2, 1] = True
    rest = "".join(f"{token} " for token in range(2, size))
    advantage = rollout_advantages(results.kept, ALGORITHM)["h-2"]
    assert episode_record(3, batch, results.kept, masked, known, WORDS) == {
        "step": 3,
        "rollout": "h-2",
        "mode": "memory, off-policy",
        "task": {"room": "den", "api_key": "(secret, left out)"},
        "return": 3.0,
        "advantage": pytest.approx(advantage, rel=1e-5),
        "tips": [7, 5],
        "mask_known": True,
        "cut": False,
        "spans": [["read", "100 101 102 ", 3], ["trained", "0 ", 1], ["masked", "1 ", 1], ["trained", rest, size - 2]],
    }


def test_masks_are_kept_by_call(tmp_path: Path) -> None:
    """Two rows of a rollout, the first of two turns, the second of them cut; a row that was left out."""
    turns = [
        ([1, 2], [10, 11, 12]),
        ([1, 2, 10, 11, 12, 3], [13, 14, 15, 16, 17]),  # one of these lies beyond the row's eight tokens
        ([7], [18, 19]),
        ([8], []),  # refused
    ]
    events = [
        event for ids, reply in turns for event in (request(ids, reply), recorded(ids, tip_free_prompt_token_ids=ids))
    ]
    episodes = [rollout_of(name, events, OFF_POLICY, final_reward=float(name[1])) for name in ("g1", "g2")]
    batch, results = rows_of(episodes)
    assert batch.non_tensor_batch["rollout_id_list"].tolist() == ["g1", "g1", "g2", "g2"]
    rows = call_rows(episodes, results, 1, "training", {}, tmp_path / "none")
    masked = torch.zeros(4, RESPONSE, dtype=torch.bool)
    masked[0, [0, 3, 5]] = True  # 3 is an observation
    masked[1, 1] = True
    add_masks(rows, results.kept, batch, masked, torch.tensor([True, True, False, True]))
    write_rollouts(tmp_path / "rollouts", rows, "all")
    yes, no = True, False
    assert [(call["trained"], call["masked"]) for call in read_calls(tmp_path / "rollouts", "g1")] == [
        ([yes, yes, yes], [yes, no, no]),
        ([yes, yes, yes, yes, no], [no, yes, no, no, no]),
        ([yes, yes], [no, yes]),
        ([], None),
    ]
    assert [call["masked"] for call in read_calls(tmp_path / "rollouts", "g2")] == [None, None, [no, no], None]
    kept = [call["log_probs"] or [] for call in read_calls(tmp_path / "rollouts", "g1")]
    assert [*map(len, kept)] == [len(reply) for _, reply in turns]


def test_rows_without_tips_and_the_teacher_of_each_token() -> None:
    """Tips are the tokens from 900 on. The likeliest tokens of a sampled one are itself and one a hundred higher.

    Turns merge, a rewritten history opens a row, a request was sent again, a turn has no tip-free prompt, a row is cut,
    a call has no teacher. On-policy rollouts of the same calls keep their tips.
    """
    turns = [
        # sent, without tips, reply
        ([1, 900, 2], [1, 2], [10, 11]),
        ([1, 900, 2, 10, 11, 901, 3], [1, 2, 10, 11, 3], [12]),
        ([1, 900, 2, 10, 11, 901, 3], [1, 2, 10, 11, 3], [13]),  # again; the next prompt holds this one
        ([1, 900, 2, 10, 11, 901, 3, 13, 4], [1, 2, 10, 11, 3, 13, 4], [14, 15]),
        ([5, 902], [5], [16]),
        ([5, 902, 16, 6], None, [17]),
        ([7, 903], [7], [18, 19, 20, 21, 22, 23, 24, 25, 26, 27]),
        ([8], [8], [28]),
    ]
    events = []
    for number, (sent, free, reply) in enumerate(turns):
        log_probs = [-token / 100 for token in reply]
        tops = {"top_tokens": [[t, t + 100] for t in reply], "top_log_probs": [[p, p - 1] for p in log_probs]}
        known = {} if free is None else {"tip_free_prompt_token_ids": free}
        events += [
            request(sent, reply, log_probs, ended=float(number), seconds=1.5 if number == 2 else 0.5),
            recorded(sent, **known, **({} if number == 7 else tops)),
        ]
    rollouts = [
        rollout_of(name, of_rollout, mode, data_id="g" if name in "abcd" else "h", final_reward=value)
        for name, of_rollout, mode, value in (
            *(("a", events, OFF_POLICY, 0.0), ("b", events, OFF_POLICY, 2.0)),
            *(("c", events[:2], NO_MEMORY, 1.0), ("d", events[:2], NO_MEMORY, -1.0)),
            *(("e", events[:8], ON_POLICY, 1.0), ("f", events[:8], ON_POLICY, -1.0)),
        )
    ]
    batch, results = rows_of(rollouts)
    assert batch.non_tensor_batch["rollout_id_list"].tolist() == [*"aaaabbbbcdef"]
    assert batch.batch["off_policy"].tolist() == [True] * 8 + [False] * 4
    assert batch.batch["memory"].tolist() == [True] * 8 + [False] * 2 + [True] * 2
    mask = batch.batch["response_mask"].bool()
    for row, ids, trained in (
        (0, [1, 2, 10, 11, 3, 13, 4, 14, 15], [1, 1, 0, 1, 0, 1, 1, 0]),
        (10, [1, 900, 2, 10, 11, 901, 3, 13, 4, 14, 15], [1, 1, 0, 0, 1, 0, 1, 1]),
    ):
        assert batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()].tolist() == ids
        assert mask[row].tolist() == trained
        assert batch.batch["responses"][row][mask[row]].tolist() == [10, 11, 13, 14, 15]
        log_probs = batch.batch["rollout_log_probs"][row][mask[row]].tolist()
        assert log_probs == pytest.approx([-0.1, -0.11, -0.13, -0.14, -0.15])  # taken with the tips

    metrics = distill(batch, worth_imitating(results.kept, ALGORITHM), results, imitate=False)
    assert metrics == {"empo2/distilled_rows": 3, "empo2/untaught_tokens": 1}
    assert batch.batch["distilled"].tolist() == [False] * 4 + [True] * 3 + [False] * 5  # the eighth has no teacher
    assert not batch.batch["advantages"][:8].any() and batch.batch["advantages"][8:].any()
    taught = []
    assert batch.batch["teacher_tokens"].shape == (12, 8, 20)  # the third row of each has eight trained tokens
    for row in range(12):
        for place, sampled in enumerate(batch.batch["responses"][row][mask[row]].tolist()):
            ids, log_probs = (batch.batch[name][row, place] for name in ("teacher_tokens", "teacher_log_probs"))
            if row not in range(4, 8) or sampled == 28:
                assert not log_probs.isfinite().any()
                continue
            taught.append(sampled)
            assert ids[:2].tolist() == [sampled, sampled + 100]
            assert log_probs[:2].tolist() == pytest.approx([-sampled / 100, -1 - sampled / 100])
            assert not log_probs[2:].isfinite().any()
    assert taught == [10, 11, 13, 14, 15, 16, *range(18, 26)]


def configuration() -> Any:
    limits = {"trajectory_max_prompt_length": PROMPT, "trajectory_max_response_length": RESPONSE}
    actor = {
        "ppo_mini_batch_size": 2,
        "ppo_micro_batch_size_per_gpu": 3,
        "ppo_epochs": 1,
        "data_loader_seed": 42,
        "entropy_coeff": 0.0,
    }
    rollout, ref = {"n": 8, "log_prob_micro_batch_size_per_gpu": 2, "temperature": 1.0}, {}
    return OmegaConf.create(
        {
            "agentlightning": {"trace_aggregator": limits},
            "data": {"train_batch_size": 4},
            "actor_rollout_ref": {
                "rollout": rollout,
                "ref": ref | {"log_prob_micro_batch_size_per_gpu": None},
                "actor": actor,
            },
        }
    )


class StepUnderTest(Empo2Trainer):
    """A trainer that has played these rollouts, and whose workers note what they are given."""

    def __init__(self, rollouts: list[CompletedRollout], *settings: str, gpus: int = 1, folder: Path | None = None):
        self.config = configuration()
        self.settings = load_settings("gpu", ["algorithm.updates_per_step=2", *settings])
        self.global_steps, self.total_training_steps, self.is_async = 7, 100, False
        self._carry_over_rollouts, self.use_reference_policy = [], True
        self.resource_pool_manager: Any = SimpleNamespace(get_n_gpus=lambda: gpus)
        self.tokenizer, self.processor = SimpleNamespace(**vars(WORDS), pad_token_id=0), None
        self.records = RunRecords(folder and str(folder), self.settings.run, self.tokenizer)
        self.replay = Replay(self.settings.algorithm)
        self.pushed: list[int] = []
        self.checkpoint_manager: Any = SimpleNamespace(sleep_replicas=lambda: None, update_weights=self.pushed.append)
        self.told: list[Any] = []
        self.gateway: Any = SimpleNamespace(updated=lambda step, results: self.told.append((step, results)))
        self.actor_rollout_wg: Any = SimpleNamespace(update_actor=self.update)
        self.rollouts, self.unusable = rollouts, 0  # so many times nothing can be used
        self.max_prompt_tokens = math.inf
        self.sums: dict[str, list[float]] = {
            "pg_clipfrac": [1.0, 3.0],
            "ppo_kl": [0.0, 4.0],
            "pg_clipfrac_lower": [0.0, 0.0],
            "compared_rows": [4, 9],
            "disagreeing_rows": [1, 2],
            "log_ppl_gap": [1.0, 7.0],
            "masked_at": [0, 0],
            "tokens/off_policy": [8.0, 0.0],
            "masked/off_policy": [2.0, 0.0],
            "tokens/without_tips": [0.0, 28.0],
            "tokens/with_tips": [3.0, 1.0],
            "clipped/with_tips": [1.0, 0.0],
            "mfu": [0.5, 0.5],
        }

    def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
        return {"name": np.array(["task"], dtype=object)}

    def play(self, tasks: DataProto, *, is_train: bool) -> list[CompletedRollout]:
        results = StepResults(self.max_prompt_tokens)
        self.manager: Any = SimpleNamespace(results=results, metrics={"empo2/calls": 3}, played=self.rollouts)
        usable = [results.train(rollout) for rollout in self.rollouts]
        if self.unusable:
            self.unusable -= 1
            for rollout in usable:
                results.drop(rollout, "alone_in_group")
            raise NoUsableRollouts("none")
        return usable

    def update(self, data: Any) -> Any:
        self.trained, self.mini_batch = data, tensordict_utils.get(data, "mini_batch_size")
        metrics = {name: [*values] for name, values in self.sums.items()}
        return tensordict_utils.get_tensordict({}, non_tensor_dict={"metrics": metrics})

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        self.forwarded = batch
        log_probs = -batch.batch["input_ids"][:, -RESPONSE:].float() - 0.5
        return DataProto.from_dict({"old_log_probs": log_probs, "ref_log_prob": log_probs}), 12.5

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return self._compute_old_log_prob(batch)[0]

    def step(self) -> tuple[dict[str, Any], DataProto]:
        result = self._train_step({}, False)
        assert result is not None
        return result


def in_groups(count: int) -> dict[str, float]:
    """The returns of groups of about eight."""
    return {f"g{i % max(1, round(count / 8))}-{i}": float(7 * i % 11 - 40) for i in range(count)}


@pytest.mark.parametrize("keep", [1, 2, None])
def test_the_last_checkpoint_is_kept_until_the_next_one_is_complete(keep: int | None, tmp_path: Path) -> None:
    trainer, saved = StepUnderTest([], *REPLAY), tmp_path / "checkpoints"
    trainer.config = OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(saved), "default_hdfs_dir": None, "max_actor_ckpt_to_keep": keep},
            "actor_rollout_ref": {"actor": {"checkpoint": {}}},
        }
    )
    trainer.use_critic = False
    trainer.train_dataloader = cast(Any, SimpleNamespace(state_dict=dict))
    verls: Any = object.__new__(BaseCheckpointManager)
    verls.previous_saved_paths = []

    def save(folder: str, remote: None, step: int, max_ckpt_to_keep: int | None) -> None:
        verls.ensure_checkpoint_capacity(max_ckpt_to_keep)
        Path(folder).mkdir(parents=True)
        Path(folder, "weights").write_text(str(step))
        verls.register_checkpoint(folder, max_ckpt_to_keep)

    def snapshot(file: Path) -> None:
        last = last_checkpoint(saved)
        assert (last is None) == (trainer.global_steps == 1)
        assert last is None or (last / "actor/weights").exists()  # a kill here leaves it
        file.write_text("tips")

    trainer.actor_rollout_wg, trainer.gateway = (
        SimpleNamespace(save_checkpoint=save),
        SimpleNamespace(snapshot=snapshot),
    )
    for trainer.global_steps in (1, 2, 3, 4):
        trainer._save_checkpoint()
        whole = sorted(int(file.read_text()) for file in saved.glob("*/actor/weights"))
        assert whole == [*range(1, 5)][: trainer.global_steps][-(keep or 4) :]
        assert [step_of(each) for each in complete_checkpoints(saved)] == whole
        assert len([*saved.glob("*/replay.pt")]) == len(whole)


@pytest.mark.parametrize("steps", [3, 4, 8])  # of four an epoch
@pytest.mark.parametrize("left", [8, 6, 5])  # tasks, of eight; by an epoch's third batch six were drawn
def test_a_continued_run_draws_the_tasks_that_come_next(
    steps: int, left: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trainer_of(tasks: int, response: int = RESPONSE) -> StepUnderTest:
        trainer = StepUnderTest([], *REPLAY)
        trainer.gateway = SimpleNamespace(restore=lambda _: None)
        order = RandomSampler(range(tasks), generator=torch.Generator().manual_seed(1))
        trainer.train_dataloader = StatefulDataLoader([*range(tasks)], batch_size=2, sampler=order)  # type: ignore[arg-type]
        limits = {"trajectory_max_prompt_length": PROMPT, "trajectory_max_response_length": response}
        trainer.config = OmegaConf.create(
            {
                "agentlightning": {"trace_aggregator": limits},
                "trainer": {
                    "default_local_dir": str(tmp_path),
                    "default_hdfs_dir": None,
                    "resume_mode": "resume_path",
                    "resume_from_path": str(tmp_path / f"global_step_{steps}"),
                    "del_local_ckpt_after_load": False,
                },
            }
        )
        trainer.use_critic, trainer.epoch, trainer._train_dataloader_iter = False, 0, None
        trainer.actor_rollout_wg = SimpleNamespace(load_checkpoint=lambda *_, **__: None)
        return trainer

    def batches(trainer: StepUnderTest) -> Iterator[list[int]]:
        while True:
            yield cast(torch.Tensor, trainer._next_train_batch_dict()).tolist()

    first, again, longer = trainer_of(8), trainer_of(left), trainer_of(left, RESPONSE + 1)
    drawn = batches(first)
    for _ in range(steps):
        next(drawn)
    (tmp_path / f"global_step_{steps}").mkdir()
    torch.save(first.train_dataloader.state_dict(), tmp_path / f"global_step_{steps}" / "data.pt")
    of_widths = {name: torch.zeros(1, width) for name, width in (("prompts", PROMPT), ("responses", RESPONSE))}
    torch.save({b"a task": DataProto.from_dict(of_widths)}, tmp_path / f"global_step_{steps}" / "replay.pt")
    again._load_checkpoint()
    assert again.global_steps == steps and len(again.replay.drawn(steps)) == 1
    shown = [*islice(batches(again), 6)]
    if left == 8:
        assert shown == [*islice(drawn, 6)]
    else:  # the rest of an epoch of six, if any; then epochs of all
        assert {task for batch in shown[-3:] for task in batch} == {*range(left)}
    assert "replayed" not in capsys.readouterr().out
    longer._load_checkpoint()
    assert not longer.replay.drawn(steps) and "1 of 1 stored successes are not replayed" in capsys.readouterr().out


@pytest.mark.parametrize("last", [True, False])
def test_a_signal_in_the_last_step_leaves_its_validation(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = StepUnderTest(played(in_groups(16)))
    trainer.config.trainer = {"test_freq": 7, "save_freq": -1}
    trainer.total_training_steps = 7 if last else 8
    signals = iter([None, "SIGTERM"])  # it comes while the step is played
    monkeypatch.setattr(preemption, "came", lambda: next(signals))
    trainer.step()
    assert trainer.total_training_steps == 7
    assert trainer.config.trainer == ({"test_freq": 7, "save_freq": -1} if last else {"test_freq": -1, "save_freq": 1})


def test_a_step_trains_all_rows_in_planned_updates() -> None:
    """And turns the sums of the loss into means: a mean of fractions would weigh a token by its neighbours' number."""
    trainer = StepUnderTest(played(in_groups(31)), gpus=2)
    metrics, batch = trainer.step()
    assert len(batch) == 31  # nothing but real rows, and all of them
    assert (metrics["empo2/off_policy_rows"], metrics["empo2/reply_tokens_lost"], metrics["empo2/calls"]) == (0, 0, 3)
    # Four groups in two updates of 15 and 16 rows; two GPUs with micro-batches of three: multiples of six.
    assert (trainer.mini_batch, len(trainer.trained)) == (18, 36)
    weights = trainer.trained["token_weight"]
    assert (weights > 0).sum() == 31 and trainer.pushed == [7]
    # An update's weights, times the trained tokens, are 1: each of its M rollouts has 1/M.
    tokens = torch.tensor([int(row.bool().sum()) for row in trainer.trained["response_mask"].unbind()])
    ranks = (weights * tokens).reshape(2, 2, 9)  # rank, update, row
    assert ranks.sum((0, 2)).tolist() == pytest.approx([1, 1])
    assert (
        metrics.items()
        >= {
            "actor/pg_clipfrac": 0.1,
            "empo2/with_tips/clipped": 0.25,
            "actor/ppo_kl": 0.1,
            "actor/pg_clipfrac_lower": 0.0,
            "empo2/masked_token_fraction": 0.25,
            # What vLLM and trainer disagree by is of the first update alone, since later ones see another policy.
            "rollout_corr/log_ppl_abs_diff": 0.25,
            "empo2/updates": 2,
            "empo2/disagreeing_rows": 3,
            "empo2/step_attempts": 1,
            "perf/mfu/actor": 0.5,
        }.items()
    )
    assert not [name for name in metrics if name.startswith("actor/masked_at")]
    trainer.sums |= {"compared_rows": [0, 4], "tokens/with_tips": [0, 0]}  # of an off-policy step
    metrics, _ = trainer.step()
    assert not {"rollout_corr/log_ppl_abs_diff", "empo2/with_tips/clipped"} & metrics.keys()


def test_a_steps_rows_are_trained_once_an_epoch() -> None:
    trainer = StepUnderTest(played(in_groups(16)))
    trainer.config.actor_rollout_ref.actor.ppo_epochs = 3  # as algorithm.update_epochs says
    trainer.sums["disagreeing_rows"] = [1, 2] * 3
    metrics, _ = trainer.step()
    assert (tensordict_utils.get(trainer.trained, "epochs"), metrics["empo2/updates"]) == (3, 6)
    assert metrics["empo2/disagreeing_rows"] == 3


def test_old_and_reference_log_probs() -> None:
    """Off-policy: as vLLM sampled, with tips (the paper's tables); or the tip-free policy's own (its Algorithm 1).

    Those of on-policy rows are vLLM's either way. 14 or 15 rows on four GPUs in micro-batches of two.
    """
    trainer = StepUnderTest(played(in_groups(15), OFF_POLICY), gpus=4)
    _, batch = trainer.step()
    kept = batch.batch["rollout_log_probs"].clone()
    assert (kept[batch.batch["response_mask"] == 1] < 0).all()
    assert batch.batch["old_log_probs"].tolist() == kept.tolist()
    own = -batch.batch["input_ids"][:, -RESPONSE:].float() - 0.5  # as _compute_old_log_prob gives
    assert batch.batch["ref_log_prob"].tolist() == own.tolist()
    assert len(trainer.forwarded) == 16

    algorithm = load_settings("gpu", ["algorithm.off_policy_old_log_probs=tip-free"]).algorithm
    batch.batch["off_policy"][3] = False
    old, utilization = old_log_probs(trainer, batch, algorithm)
    own[3] = kept[3]
    assert (old.tolist(), utilization) == (own.tolist(), 12.5)
    assert batch.batch["rollout_log_probs"].tolist() == kept.tolist()
    assert (len(trainer.forwarded), trainer.forwarded.batch["response_mask"].any(-1).sum()) == (16, 14)
    held = rows_with_kl(batch, load_settings("gpu", ["algorithm.kl_rows=with-tips"]).algorithm)
    reference = reference_log_probs(trainer, batch, held)
    assert reference.any(-1).nonzero().tolist() == [[3]] and len(trainer.forwarded) == 8  # that row, and fillers


def with_teachers(rollouts: list[CompletedRollout]) -> list[CompletedRollout]:
    for rollout_ in rollouts:
        size = len(rollout_.events[0]["data"]["response"]["choices"][0]["token_ids"])
        tops = {"top_tokens": [[*range(21)]] * size, "top_log_probs": [[-3.5] * 21] * size}  # 20 are taken
        rollout_.events[1]["data"] |= tops
    return rollouts


@pytest.mark.parametrize(("loss", "flat"), [("ratio", 1.0), ("distillation", 0.0)])
def test_a_step_in_which_all_with_tips_succeed_is_distilled(loss: str, flat: float) -> None:
    """Its advantages are 0, and yet it has a gradient; without distillation it has none."""
    rollouts = played({"g-0": 100.0, "g-1": 100.0}, OFF_POLICY)
    with_teachers(rollouts[:1])
    trainer = StepUnderTest(rollouts, f"algorithm.off_policy_loss={loss}")
    trainer.use_reference_policy = False
    metrics, batch = trainer.step()
    assert metrics["empo2/groups_without_gradient"] == flat
    assert metrics.get("empo2/distilled_rows") == (None if flat else 1)
    assert ("teacher_log_probs" in batch.batch) is (not flat)
    untaught = int(batch.batch["response_mask"][1].sum())  # played() records no likeliest tokens
    assert metrics.get("empo2/untaught_tokens") == (None if flat else untaught)
    assert (trainer.trained["token_weight"] > 0).sum() == 1  # flat: an update keeps one row


def test_what_was_sampled_is_the_teacher_of_a_rollout_that_is_imitated() -> None:
    """With certainty, also of calls whose likeliest tokens are not known."""
    trainer = StepUnderTest(played({"g-0": 0.0, "g-1": 100.0}, OFF_POLICY), "algorithm.off_policy_loss=imitation")
    trainer.use_reference_policy = False
    metrics, batch = trainer.step()
    assert metrics["empo2/untaught_tokens"] == 0 and batch.batch["distilled"].tolist() == [False, True]
    sampled = batch.batch["responses"][1][batch.batch["response_mask"][1].bool()]
    tokens, log_probs = (batch.batch[name][1, : len(sampled)] for name in ("teacher_tokens", "teacher_log_probs"))
    assert len(sampled) and tokens[:, 0].tolist() == sampled.tolist() and not log_probs[:, 0].any()
    assert not log_probs[:, 1:].isfinite().any()


@pytest.mark.parametrize("kl_rows", ["with-tips", "all-with-tips"])
def test_off_policy_rollouts_that_teach_nothing_are_held_with_their_tips(kl_rows: str, tmp_path: Path) -> None:
    """Tips are the tokens from 900 on. With its tips the last rollout's prompt is too long, so it stays as it is."""
    tips = {"g-0": [], "g-1": [900], "g-2": [901], "g-3": [902, 903, 904, 905]}
    returns = {"g-0": 0.0, "g-1": 100.0, "g-2": 0.0, "g-3": 0.0}
    rollouts = []
    for name, (_, index) in zip(tips, (each.split("-") for each in tips), strict=True):
        sent, reply = [1, *tips[name], 2, 3], [10 + int(index)]
        tops = {"top_tokens": [reply], "top_log_probs": [[-0.5]]}
        events = [request(sent, reply, [-0.5]), recorded(sent, tip_free_prompt_token_ids=[1, 2, 3], **tops)]
        own = {"data_id": "g", "sample_idx_in_step": int(index), "final_reward": returns[name]}
        rollouts.append(rollout_of(name, events, OFF_POLICY if tips[name] else NO_MEMORY, **own))
    form = ("algorithm.form=internalise", "algorithm.replay_per_task=0", "algorithm.updates_per_step=1")
    trainer = StepUnderTest(rollouts, *form, f"algorithm.kl_rows={kl_rows}", folder=tmp_path)
    trainer.max_prompt_tokens = PROMPT
    metrics, batch = trainer.step()
    logged = [each.advantage for each in read_rollouts(tmp_path / "rollouts", step=7)]
    assert logged == [0, 0, 0, 0]  # as trained with: g-1 is distilled
    held = kl_rows == "all-with-tips"
    read = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
    ]
    assert read == [[1, 2, 3, 10], [1, 2, 3, 11], [1, *[901] * held, 2, 3, 12], [1, 2, 3, 13]]
    assert batch.batch["off_policy"].tolist() == [False, True, not held, True]
    assert batch.batch["distilled"].tolist() == [False, True, False, False]
    assert [result.held for result in trainer.manager.results.kept.values()] == [False, False, held, False]
    assert not batch.batch["advantages"][1:].any()
    assert metrics["empo2/off_policy_fraction"] == 0.75  # as they were drawn
    assert batch.batch["ref_log_prob"].any(-1).tolist() == [False, False, held, False]
    weighed = zip(trainer.trained["input_ids"].unbind(), trainer.trained["token_weight"], strict=True)
    trained = {int(ids[-1]) for ids, weight in weighed if weight > 0}
    assert trained == ({11, 12} if held else {10, 11})  # an update without an on-policy row keeps one


@pytest.mark.parametrize(("each", "shown"), [(1, 2), (2, 3)])  # of three tasks that succeeded
def test_successes_are_trained_again_in_later_steps(each: int, shown: int, tmp_path: Path) -> None:
    """The surest of each task, with its teacher, as one rollout more; the step's records and metrics are its own."""
    returns = {"g-0": 100.0, "g-1": 3.0, "h-2": 100.0, "h-3": 100.0, "i-4": 20.0, "i-5": 10.0, "k-6": 100.0}
    rollouts = with_teachers(played(returns, OFF_POLICY))
    for rollout_ in rollouts:
        rollout_.input = {"house": rollout_.data_id}
    trainer = StepUnderTest(rollouts, *REPLAY, "algorithm.tasks_per_step=2", f"algorithm.replay_per_task={each}")
    trainer.use_reference_policy = False
    metrics, first = trainer.step()
    assert (metrics["empo2/distilled_rows"], metrics["empo2/replayed_rows"]) == (5, 0)  # i-4 succeeded in nothing
    masks = first.batch["response_mask"].bool()
    second, third = (first.batch["rollout_log_probs"][row][masks[row]].mean() for row in (2, 3))
    assert third > second
    first = first.select_idxs([0, 3, 6])
    assert first.non_tensor_batch["rollout_id_list"].tolist() == ["g-0", "h-3", "k-6"]
    unsure = first.select_idxs([0])
    unsure.batch["rollout_log_probs"] = unsure.batch["rollout_log_probs"] - 0.1
    unsure.non_tensor_batch["rollout_id_list"] = np.array(["unsure"])
    trainer.replay.store(unsure, {"unsure": trainer.manager.results.kept["g-0"]})

    trainer.replay.save(tmp_path / "replay.pt")
    trainer.replay = Replay(trainer.settings.algorithm)
    trainer.replay.load(tmp_path / "replay.pt", PROMPT, RESPONSE)
    trainer.rollouts = played({"j-0": 10.0, "j-1": 50.0}, NO_MEMORY)
    metrics, batch = trainer.step()
    assert metrics["empo2/replayed_rows"] == shown
    assert batch.non_tensor_batch["rollout_id_list"].tolist() == ["j-0", "j-1"]
    assert [result.rollout_id for result in trainer.told[-1][1]] == ["j-0", "j-1"]
    assert metrics["training/n_sample_trained"] == 2 and metrics["critic/score/max"] == 50
    again = trainer.trained["distilled"].nonzero()[:, 0].tolist()
    assert len(again) == shown and (trainer.trained["token_weight"] > 0).sum() == 2 + shown
    trained = {name: column.unbind() for name, column in trainer.trained.items() if isinstance(column, torch.Tensor)}
    for row in again:
        length = int(trained["response_mask"][row].sum())
        source = first.select_idxs([[int(mask.sum()) for mask in first.batch["response_mask"]].index(length)]).batch
        assert source["teacher_log_probs"][0, :length].isfinite().any(-1).all()
        for key in ("teacher_tokens", "teacher_log_probs"):
            assert trained[key][row][:length].tolist() == source[key][0, :length].tolist()
        assert not trained["advantages"][row].any() and trained["off_policy"][row]


@pytest.mark.parametrize(("states", "shared", "both"), [("aabc", 0.5, 2 * 0.70711), ("abcd", 0.0, 0.70711)])
def test_turns_of_one_state_are_compared_with_gigpo(
    capsys: pytest.CaptureFixture[str], states: str, shared: float, both: float
) -> None:
    """Two groups of two one-turn rollouts; those of g began in one state: twice ±1/√2, those of h in two: once."""
    rollouts = played({"g-0": 10.0, "g-1": 50.0, "h-2": 30.0, "h-3": 90.0}, NO_MEMORY, states)
    trainer = StepUnderTest(rollouts, "algorithm.advantage=gigpo")
    trainer.global_steps = 1
    metrics, batch = trainer.step()
    assert (metrics["gigpo/shared_turns"], metrics["empo2/groups_without_gradient"]) == (shared, 0)
    found = batch.batch["advantages"][:, 0].tolist()
    assert found == pytest.approx([-both, both, -0.70711, 0.70711], rel=1e-3)
    assert ("algorithm.advantage='gigpo'" in capsys.readouterr().out) == (not shared)


@pytest.mark.parametrize(
    ("returns", "fraction", "spread"),
    [
        ([(8.0, 8.0), (8.0, 8.4), (100.0, 100.0), (8.0, 9.0)], 0.75, None),
        ([(0.0, 0.25), (0.5, 0.6)], 1, "0.25"),
        ([(0.0, 0.0)], 1, None),  # nothing that could be lost
    ],
)
def test_groups_without_gradient_are_counted_and_the_first_step_without_any_is_a_warning(
    returns: list[tuple[float, float]], fraction: float, spread: str | None, capsys: Any
) -> None:
    """With rewards of 0..1 and ScienceWorld's tolerance nothing would ever be learned, and nothing said."""
    rollouts = {f"g{group}-{i}": value for group, pair in enumerate(returns) for i, value in enumerate(pair)}
    trainer = StepUnderTest(played(rollouts))
    for trainer.global_steps in (1, 2):
        assert trainer.step()[0]["empo2/groups_without_gradient"] == fraction
    said = [line for line in capsys.readouterr().out.splitlines() if "algorithm.return_tolerance=0.0025" in line]
    want = f"step 1: WARNING: no group has a gradient: returns differ by up to {spread} within a group"
    assert [line[: len(want)] for line in said] == ([want] if spread else [])


def test_what_gets_no_gradient_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Replies beyond the row, requests that were sent again: a line in the run's output, not only a metric."""

    class Lossy(StepUnderTest):
        def play(self, tasks: DataProto, *, is_train: bool) -> list[CompletedRollout]:
            usable = super().play(tasks, is_train=is_train)
            results = self.manager.results
            name = next(iter(results.kept))
            results.kept[name] = replace(results.kept[name], reply_tokens=500)
            for number in range(2):
                results.dropped[str(number)] = DroppedRollout("failed_by_agent", "", "", NO_MEMORY)
            results.left_out["repeated_calls"] = 3
            return usable

    trainer = Lossy(played(in_groups(16)))
    metrics, batch = trainer.step()
    lost = metrics["empo2/reply_tokens_lost"]
    sampled = sum(each.reply_tokens for each in trainer.manager.results.kept.values())
    assert lost == sampled - int(batch.batch["response_mask"].sum())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert line == (
        "step 7: training on 16 rollouts in 16 rows; dropped 2 failed by agent; WARNING: 3 calls not trained "
        f"(their request was sent again), {lost} reply tokens without gradient (of what was dropped or cut)"
    )


def test_each_step_leaves_a_record(tmp_path: Path) -> None:
    """The update hands over which tokens it masked; of a row that it left out nothing is known."""
    StepUnderTest(played(in_groups(8), OFF_POLICY)).step()  # in a script of the user's own, without a run's folder
    trainer = StepUnderTest(played(in_groups(8), OFF_POLICY), folder=tmp_path)
    trainer.step()
    trainer.global_steps, trainer.use_reference_policy = 8, False
    # A group of equal scores: all rows but the first one of an update are left out.
    trainer.rollouts = played(dict.fromkeys(in_groups(8), 3.0), OFF_POLICY)
    metrics, batch = trainer.step()
    assert metrics["empo2/groups_without_gradient"] == 1
    # The gateway is told of all rollouts, whose traces get it; of the eight rows one was updated in the end.
    (step, first), (_, last) = trainer.told
    assert step == 7 and {each.rollout_id for each in first} == set(batch.non_tensor_batch["rollout_id_list"])
    assert sorted(each.masked_tokens for each in first) == [0] * 7 + [1]
    advantages = rollout_advantages(rows_of(played(in_groups(8), OFF_POLICY))[1].kept, ALGORITHM)
    assert {each.rollout_id: each.advantage for each in first} == pytest.approx(advantages, rel=1e-5)
    assert [each.masked_tokens for each in last].count(None) == 7 and all(each.off_policy for each in last)
    records = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert [(record["step"], record["mask_known"]) for record in records] == [(7, True), (8, True)]
    assert [span[0] for span in records[0]["spans"]] == ["read", "masked", "trained"] and records[0]["advantage"] != 0
    calls = {step: read_rollouts(tmp_path / "rollouts", step=step) for step in (7, 8)}
    assert [len(of_step) for of_step in calls.values()] == [8, 8]
    calls = [read_calls(tmp_path / "rollouts", name)[-1] for name in in_groups(8)]
    assert all(call["trained"] and all(call["trained"]) for call in calls)
    assert [call["masked"] and call["masked"][0] for call in calls] == [True, *[None] * 7]  # the last update left 7 out


def test_each_step_leaves_its_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what became of them: trained, dropped, or without any that can be used; also where the update fails."""

    class Failing(StepUnderTest):
        def play(self, tasks: DataProto, *, is_train: bool) -> list[CompletedRollout]:
            *usable, alone = super().play(tasks, is_train=is_train)
            self.manager.results.drop(alone, "alone_in_group")
            return usable

        def update(self, data: Any) -> Any:
            assert self.manager.played == [] and not self.manager.results.calls
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="CUDA"):
        Failing(played({"g-0": 1.0, "g-1": 3.0, "h-2": 2.0}, ON_POLICY), folder=tmp_path).step()
    folder = tmp_path / "rollouts"
    assert [(each.id, each.dropped, each.return_, each.advantage) for each in read_rollouts(folder, step=7)] == [
        ("g-0", None, 1.0, pytest.approx(-0.7071, rel=1e-3)),
        ("g-1", None, 3.0, pytest.approx(0.7071, rel=1e-3)),
        ("h-2", "alone_in_group", 2.0, None),
    ]

    trainer = StepUnderTest(played({"h-0": 4.0}), folder=tmp_path)
    trainer.global_steps, trainer.unusable = 8, 3
    with pytest.raises(NoUsableRollouts):
        trainer.step()
    assert {(each.id, each.dropped) for each in read_rollouts(folder, step=8)} == {("h-0", "alone_in_group")}
    said = [line for line in capsys.readouterr().out.splitlines() if "attempt" in line]
    assert said == [f"step 8, attempt {attempt} of 3: none" for attempt in (1, 2, 3)]

    folder.rename(tmp_path / "before")
    folder.write_text("no folder")
    trainer.records.note_rollouts(trainer.manager, 8, "validation", {})
    trainer.manager.played = played({"i-0": 4.0})
    trainer.manager.results.train(trainer.manager.played[0])
    trainer.records.note_rollouts(trainer.manager, 8, "validation", {})
    trainer.records.write_rollouts()  # the run goes on
    assert "empo2: note: step 8: WARNING: its rollouts are not kept: " in capsys.readouterr().out


def test_a_step_goes_on_with_the_next_tasks_where_none_can_be_used() -> None:
    """What was lost is counted with the rollouts of the attempt that is trained."""
    trainer = StepUnderTest(played(in_groups(16)))
    trainer.unusable = 1
    metrics, _ = trainer.step()
    assert (metrics["empo2/step_attempts"], metrics["empo2/rollouts_dropped"]) == (2, 16)


def test_rollouts_that_outlive_their_step() -> None:
    """Those that still run after the last step are dropped."""

    class Async(StepUnderTest):
        def play(self, tasks: DataProto, *, is_train: bool) -> list[CompletedRollout]:
            usable = super().play(tasks, is_train=is_train)
            self.manager.drop_carried_over = lambda: dropped.append(self.global_steps)
            self._carry_over_rollouts = [carried]
            kept = self.manager.results.kept
            for number, name in enumerate(kept):
                kept[name] = replace(kept[name], versions=[5, 6] if number < 4 else [6])
            return usable

    dropped: list[int] = []
    carried = EnqueuedRollout(data_id="t", rollout_id="r", step=5, sample_idx_in_step=0, enqueue_time=0.0)
    trainer = Async(played(in_groups(16)))
    trainer.is_async, trainer.total_training_steps = True, 8
    metrics, _ = trainer.step()
    assert (metrics["empo2/staleness_mean"], metrics["empo2/staleness_max"]) == (0.25, 1)
    assert metrics["empo2/rollouts_of_several_versions"] == 4
    counts = ("n_prev_carry_over_rollouts", "n_new_carry_over_rollouts", "new_carry_over_age_max_steps")
    assert [metrics[f"training/async/{name}"] for name in counts] == [0, 1, 2]
    assert dropped == []
    trainer.global_steps = 8
    assert trainer.step()[0]["training/async/n_prev_carry_over_rollouts"] == 1
    assert dropped == [8]
