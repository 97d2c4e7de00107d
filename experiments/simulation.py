"""A toy that ranks forms of EMPO² before hours are spent on real runs: hundreds of seeds an arm, in minutes.

    .venv/bin/python experiments/simulation.py                             # every suite, in both worlds; some hours
    .venv/bin/python experiments/simulation.py --suite forms --world deep  # minutes
    .venv/bin/python experiments/simulation.py --arm "grpo*" --seeds 50 --output build/simulation.jsonl

A house is a way of junctions with three doors each, one right, no move to spare; a wrong door costs two moves. After an
episode the memory holds what a note tells, a true one but for `false_notes`: after a success the way; after a failure
the way to the last wrong door, and that it leads nowhere. The policy is a net of two layers whose inputs are a random
code of the junction, the doors tried and the notes; before training it has learned to read notes, with some slips. It
is a toy: no words, no retrieval. Modes, advantages, the gate of distillation, the plan of updates and the loss are the
project's own.

No number here is one of a language model.
"""

import argparse
import fnmatch
import itertools
import json
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", category=UserWarning)  # of verl's imports, on devices that are not here

from empo2.recipe.trainer import ray_environment  # noqa: E402, F401  before verl is imported

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
from agentlightning.verl.per_rollout_loss import PER_ROLLOUT_MEAN_LOSS_MODE  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from simulation_world import CODE, DOORS, FRESH, TRIALS, Houses, Net, Played, one_hot, play, reader, remember  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import FSDPActorConfig, PolicyLossConfig  # noqa: E402

from empo2.recipe.config import Algorithm, load_settings  # noqa: E402
from empo2.recipe.protocol import Mode  # noqa: E402
from empo2.recipe.trainer.advantages import rollout_advantages, worth_imitating  # noqa: E402
from empo2.recipe.trainer.manager import draw_tags  # noqa: E402
from empo2.recipe.trainer.objective import hybrid_loss  # noqa: E402
from empo2.recipe.trainer.replay import Replay, joined  # noqa: E402
from empo2.recipe.trainer.step_results import RolloutResult  # noqa: E402
from empo2.recipe.trainer.updates import plan_updates, planned_batch  # noqa: E402

DEPTHS = {"shallow": 3, "deep": 8}  # chance finds the coin once in 27 and in 6,561 episodes
RATES = (0.003, 0.01, 0.03)

type Advantages = Callable[[Mapping[str, RolloutResult], Algorithm], dict[str, float]]


def own_scale(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> dict[str, float]:
    """Return advantages of the returns, and a tenth of those of 1/n, divided by its own deviation."""
    alone, novelty = _apart(results, algorithm)
    return {name: alone[name] + 0.1 * novelty[name] for name in alone}


def where_returns_differ(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> dict[str, float]:
    """Return advantages in which 1/n counts only among rollouts whose returns differ."""
    alone, _ = _apart(results, algorithm)
    both = rollout_advantages(results, algorithm)
    return {name: both[name] if alone[name] else 0.0 for name in alone}


def _apart(results: Mapping[str, RolloutResult], algorithm: Algorithm) -> Any:
    """Return the advantages of the returns alone, and those of 1/n alone."""
    alone = rollout_advantages(results, algorithm.model_copy(update={"intrinsic_coefficient": 0.0}))
    # A novelty is never a success: it is given as a return far below one.
    small = {name: replace(each, return_=1e-3 * each.intrinsic, intrinsic=0.0) for name, each in results.items()}
    novelty = rollout_advantages(small, algorithm.model_copy(update={"return_tolerance": 0.0, "return_scale": 1e3}))
    return alone, novelty


INTRINSIC: dict[str, Advantages] = {
    "as set": rollout_advantages,  # the project's, by `intrinsic_advantage`
    "own scale": own_scale,
    "where returns differ": where_returns_differ,
}


@dataclass(frozen=True)
class Arm:
    """One way to train, `settings` being those of `algorithm`.

    intrinsic: of INTRINSIC. distinct: 1/n is earned once per state and episode, not per visit.
    stand_in: a group without notes and without a success has a stored one in the place of its first rollout.
    start_share: of the rollouts without notes, those that the start's weights play.
    start_with_notes: the start's weights play all rollouts with notes.
    teach_back: where rollouts without notes do better than those with, their moves are distilled into the policy with.
    false_notes: share of the notes of failures that name any door.
    imitate: no reinforcement; the start plays, and the weights are fine-tuned on all ways that were found.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    intrinsic: str = "as set"
    distinct: bool = False
    stand_in: bool = False
    start_share: float = 0.0
    start_with_notes: bool = False
    teach_back: bool = False
    imitate: bool = False
    false_notes: float = 0.0
    rates: Sequence[float] = RATES
    houses: int = 4
    episodes: int = 480  # in each house

    @property
    def steps(self) -> int:
        return self.houses * self.episodes // (self.settings["tasks_per_step"] * self.settings["rollouts_per_task"])

    def changed(self, settings: Mapping[str, Any] | None = None, **changes: Any) -> "Arm":
        return replace(self, settings={**self.settings, **(settings or {})}, **changes)


NO_NOVELTY = {"intrinsic_coefficient": 0.0}
PLAIN = {"intrinsic_coefficient": 0.01, "intrinsic_advantage": "plain"}
STEP = {"tasks_per_step": 4, "rollouts_per_task": 8, "updates_per_step": 2, "update_epochs": 1}
BASE = Arm({"success_return": 1.0, **STEP})
GRPO = BASE.changed({"memory_probability": 0.0, **NO_NOVELTY})
PAPER = BASE.changed({"memory_probability": 0.25, "off_policy_probability": 0.6667})
INTERNALISE = BASE.changed(  # as the form was first; "and imitation" is what it has become
    {
        "form": "internalise",
        "replay_per_task": 0,
        "off_policy_probability": 0.6667,
        "off_policy_loss": "distillation",
        "kl_rows": "with-tips",
    }
)
# With the budget of the real runs.
REPLAYING = INTERNALISE.changed({"tasks_per_step": 2, "update_epochs": 3, "replay_per_task": 2}, episodes=96)
HOLDING = REPLAYING.changed({"kl_rows": "all-with-tips"})
PAIRED = INTERNALISE.changed({"off_policy_loss": "ratio", "kl_coefficient": 0.0})
DISTILLED = INTERNALISE.changed({"kl_coefficient": 0.0})
RIVAL = GRPO.changed({"memory_probability": 1.0, "off_policy_probability": 0.0}, imitate=True)


def _suites() -> dict[str, dict[str, Arm]]:
    rivals = {"grpo": GRPO, "paper": PAPER.changed(NO_NOVELTY), "internalise": INTERNALISE.changed(NO_NOVELTY)}
    normalized = {"intrinsic_coefficient": 0.01, "intrinsic_advantage": "normalized"}
    forms = {
        "start, not trained": GRPO.changed(rates=(0.0,)),
        "start plays, fine-tuned": GRPO.changed(imitate=True),
        "start plays with notes, fine-tuned": RIVAL,
        "grpo": GRPO,
        "grpo, 1/n": GRPO.changed(normalized),
        "grpo, 1/n plain": GRPO.changed(PLAIN),
        "notes always, on-policy": GRPO.changed({"memory_probability": 1.0, "off_policy_probability": 0.0}),
        "paper": PAPER,
        "paper without 1/n": PAPER.changed(NO_NOVELTY),
        "paper, 1/n plain": PAPER.changed(PLAIN),
        "paper, tip-free": PAPER.changed({**PLAIN, "off_policy_old_log_probs": "tip-free"}),
        "paired": PAIRED,
        "paired, tip-free": PAIRED.changed({"off_policy_old_log_probs": "tip-free"}),
        "paired, distilled": DISTILLED,
        "internalise": INTERNALISE,
        "internalise, holding": INTERNALISE.changed({"kl_rows": "all-with-tips"}),
    }
    intrinsic = {
        f"{name}, {how}": arm.changed(settings, **changes)
        for name, arm in rivals.items()
        for how, settings, changes in [
            ("none", NO_NOVELTY, {}),
            ("normalized", normalized, {}),
            ("normalized, distinct", normalized, {"distinct": True}),
            ("where returns differ", normalized, {"intrinsic": "where returns differ"}),
            ("own scale", normalized, {"intrinsic": "own scale"}),
            ("plain", PLAIN, {}),
            ("plain, distinct", PLAIN, {"distinct": True}),
            ("plain, 0.03", {**PLAIN, "intrinsic_coefficient": 0.03}, {}),
            ("plain, 0.1", {**PLAIN, "intrinsic_coefficient": 0.1}, {}),
        ]
    }
    drawn = {
        f"{name}, K {players}, p {share}": arm.changed({"rollouts_per_task": players, "memory_probability": share})
        for name, arm in {"paper": PAPER.changed(PLAIN), "internalise": INTERNALISE}.items()
        for players, share in itertools.product((4, 8, 16), (0.25, 0.5, 1.0))
    }
    explored = {
        f"{name}, {how}": arm.changed(PLAIN, **change)
        for name, arm in rivals.items()
        for how, change in {
            "as it is": {},
            "with stand-ins": {"stand_in": True},
            "a quarter by the start": {"start_share": 0.25},
        }.items()
    }
    held = {
        f"distilled, q {share:.2f}, retention {weight:g}": INTERNALISE.changed(
            {"off_policy_probability": share, "kl_coefficient": weight}
        )
        for share, weight in [(1.0, 0.0), *itertools.product((0.6667, 0.3333), (0.0, 0.3, 1.0, 3.0))]
    } | {
        "internalise": INTERNALISE,
        "internalise, taught back": INTERNALISE.changed(teach_back=True),
    }
    replayed = {
        f"internalise, {epochs} epochs, replay {count} a task": REPLAYING.changed(
            {"update_epochs": epochs, "replay_per_task": count}
        )
        for epochs, count in itertools.product((1, 3), (0, 1, 2))
    }
    for share in (0.6667, 0.8, 0.9):
        replayed[f"and holding, q {share:g}"] = HOLDING.changed({"off_policy_probability": share})
    for share in (0.8, 0.9):
        name = f"internalise, 3 epochs, replay 2 a task, q {share:g}"
        replayed[name] = REPLAYING.changed({"off_policy_probability": share})
    replayed["and imitation, q 0.8"] = replayed["and holding, q 0.8"].changed({"off_policy_loss": "imitation"})
    # Then no rollout with notes is on-policy, and what the weights make of notes does not matter.
    exploring = REPLAYING.changed({"off_policy_probability": 1.0, "kl_coefficient": 0.0}, start_with_notes=True)
    beside = {
        "start plays with notes": exploring,
        "start plays with notes, and imitation": exploring.changed({"off_policy_loss": "imitation"}),
        "start plays with notes, fine-tuned": RIVAL.changed({"tasks_per_step": 2}, episodes=96),
    }
    misled = {
        "internalise, 3 epochs, replay 2 a task": REPLAYING,
        "and holding, q 0.8": replayed["and holding, q 0.8"],
        "and imitation, q 0.8": replayed["and imitation, q 0.8"],
    } | beside
    return {
        "forms": forms,
        "intrinsic": intrinsic,
        "K and p": drawn,
        "exploration": explored,
        "retention": held,
        "replay": replayed | beside,
        "false notes": {name: arm.changed(false_notes=0.3) for name, arm in misled.items()},
    }


SUITES = _suites()


@dataclass(frozen=True)
class Outcome:
    """What came of an arm at a rate, a number of each seed, [seeds].

    alone, noted: the probability that an episode finds the coin of a house that was trained on, without notes and with
    those of the memory. found: the share of these houses whose coin was ever found. half: the episodes in a house until
    `alone` is one half; NaN if it never is. read: `noted` in fresh houses, with a true note of the way. adapted: share
    of the last 4 of 16 episodes in fresh houses, with own notes, that find the coin. idle: share of groups without a
    gradient in the last quarter of training.
    gap, masked: `old_kl` and masked share of off-policy rows in each quarter of training, over all seeds.
    """

    alone: np.ndarray
    noted: np.ndarray
    found: np.ndarray
    half: np.ndarray
    read: np.ndarray
    adapted: np.ndarray
    idle: float
    gap: tuple[float, ...]
    masked: tuple[float, ...]


class Trainer:
    """Train an arm with all its seeds at once; seed s of every arm has the same houses and the same start."""

    def __init__(self, arm: Arm, rate: float, depth: int, seeds: int) -> None:
        self._arm, self._seeds, self._depth = arm, seeds, depth
        given = {"mode_per": "group", **arm.settings}
        algorithm = load_settings("cpu", [f"algorithm.{name}={value}" for name, value in given.items()]).algorithm
        self._algorithm, self._players = algorithm, algorithm.rollouts_per_task
        self._generator = torch.Generator().manual_seed(0)
        self._start = reader(seeds)
        self.net = Net(self._start.tensors)
        self.houses = Houses(seeds, arm.houses, depth, self._generator)
        self._optimizer = torch.optim.Adam(self.net.tensors, lr=rate)
        self._of_seed = [algorithm.model_copy(update={"seed": number}) for number in range(seeds)]
        self._replays = [Replay(each) for each in self._of_seed]
        self._orders = random.Random(0)
        self._ahead: list[int] = []  # houses that are played before all are drawn again
        self._sums: list[dict[str, float]] = []
        self._idle: list[float] = []
        self._config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio=algorithm.clip_high,
            clip_ratio_low=algorithm.clip_low,
            clip_ratio_high=algorithm.clip_high,
            clip_ratio_c=10.0,
            use_kl_loss=algorithm.kl_coefficient > 0,
            kl_loss_coef=algorithm.kl_coefficient,
            kl_loss_type="low_var_kl",
            policy_loss=PolicyLossConfig(loss_mode=PER_ROLLOUT_MEAN_LOSS_MODE),
        )

    def step(self, number: int) -> None:
        """Play ``tasks_per_step`` houses, remember, update."""
        tasks = self._algorithm.tasks_per_step
        self._ahead = self._ahead or self._orders.sample(range(self._arm.houses), self._arm.houses)
        chosen, self._ahead = sorted(self._ahead[:tasks]), self._ahead[tasks:]
        houses = self.houses.chosen(chosen)
        shape = (self._seeds, tasks, self._players)
        count = tasks * self._players
        self._groups = [f"{s} {h}" for s in range(self._seeds) for h in chosen for _ in range(self._players)]
        self._names = [f"{group} {number % self._players}" for number, group in enumerate(self._groups)]
        tags = (draw_tags(algorithm, number, self._players) for algorithm in self._of_seed)
        modes = [mode for each in tags for mode, _ in itertools.islice(each, count)]
        noted = torch.tensor([mode.memory for mode in modes]).view(shape)
        share = torch.rand(shape, generator=self._generator) < self._arm.start_share
        by_start = torch.where(noted, self._arm.start_with_notes, share) | self._arm.imitate
        known = copy(houses)  # with the notes of now
        played = play(self.net, self._start, houses, noted, by_start, self._arm.distinct, self._generator)
        had = houses.found.clone()
        remember(houses, played, self._arm.false_notes, self._generator)
        self.houses.learn(chosen, houses)
        if self._arm.imitate:
            self._update(self._imitated())
            return
        if self._arm.stand_in:
            self._stand_in(houses, played, had & ~noted.any(-1))
        self._update(self._with_stored(number, *self._reinforced(played, modes, known)))

    def _ways(self, houses: Houses) -> dict[str, torch.Tensor]:
        """Return the right doors of houses without notes, as rows, [seeds, houses, junctions, ...]."""
        at = torch.arange(self._depth).expand(houses.right.shape)
        inputs = houses.inputs(at, torch.zeros(*at.shape, DOORS), torch.zeros_like(at, dtype=torch.bool))
        with torch.no_grad():
            old = self.net.log_probs(inputs)
        return {"inputs": inputs, "doors": houses.right, "mask": torch.ones_like(at, dtype=torch.bool), "old": old}

    def _stand_in(self, houses: Houses, played: Played, may: torch.Tensor) -> None:
        """Put a house's way into its group that has no success; its ratio begins at 1, as if it were played now."""
        where = (may & ~played.success.any(-1)).nonzero(as_tuple=True)
        ways = {name: value[where] for name, value in self._ways(houses).items()}
        first = (*where, torch.zeros_like(where[0]))
        played.as_sent[first] = played.tip_free[first] = ways["inputs"]
        played.doors[first], played.mask[first], played.old[first] = ways["doors"], ways["mask"], ways["old"]
        played.success[first] = True

    def _imitated(self) -> DataProto:
        """Return one row of each house, its way, with an advantage of 1 if it was ever found."""
        rows = {name: value.flatten(0, 1) for name, value in self._ways(self.houses).items()}
        names = [f"{seed} {house}" for seed in range(self._seeds) for house in range(self._arm.houses)]
        seed = torch.arange(self._seeds).repeat_interleave(self._arm.houses)
        batch = self._batch(rows, names, names, seed)
        found = dict(zip(names, self.houses.found.float().flatten().tolist(), strict=True))
        _set_advantages(batch, {name: RolloutResult(name, Mode.of(memory=False), 0.0) for name in names}, found)
        return batch

    def _with_stored(self, number: int, batch: DataProto, results: Mapping[str, RolloutResult]) -> DataProto:
        """Return a step's rows, and after them the stored ones that each seed trains again."""
        if not self._algorithm.replayed_tasks:
            return batch
        others: list[DataProto] = []
        for seed, replay in enumerate(self._replays):
            others += replay.drawn(number)
            own = batch.select_idxs((batch.batch["seed"] == seed).nonzero()[:, 0])
            replay.store(own, {name: results[name] for name in own.non_tensor_batch["rollout_id_list"]})
        return joined(batch, others)

    def _reinforced(
        self, played: Played, modes: list[Mode], known: Houses
    ) -> tuple[DataProto, dict[str, RolloutResult]]:
        """Return the rows of a step's rollouts with the project's advantages, and the rollouts."""
        algorithm, names, groups = self._algorithm, [*self._names], [*self._groups]
        outside, novelty = played.success.float().flatten().tolist(), played.intrinsic.flatten().tolist()
        results = {
            name: RolloutResult(group, mode, return_, intrinsic, task={"house": group})
            for name, group, mode, return_, intrinsic in zip(names, groups, modes, outside, novelty, strict=True)
        }
        advantages = INTRINSIC[self._arm.intrinsic](results, algorithm)
        distilled = worth_imitating(results, algorithm) if algorithm.distills else set[str]()
        if algorithm.holds_untaught:
            held = {name for name, each in results.items() if each.mode.off_policy} - distilled
            results |= {name: replace(results[name], held=True) for name in held}
            advantages |= dict.fromkeys(held, 0.0)
        tip_free = torch.tensor([each.tip_free for each in results.values()])[:, None, None]
        sent, free, doors, mask, old = (
            each.flatten(0, 2) for each in (played.as_sent, played.tip_free, played.doors, played.mask, played.old)
        )
        rows = {"inputs": torch.where(tip_free, free, sent), "doors": doors, "mask": mask, "old": old}
        seed = torch.arange(self._seeds).repeat_interleave(len(modes) // self._seeds)
        if self._arm.teach_back and (back := better_without(results)):
            chosen = torch.tensor([place for place, name in enumerate(names) if name in back])
            at, tried = played.at.flatten(2), slice(CODE, CODE + DOORS)
            told = known.inputs(at, torch.zeros(*at.shape, DOORS), torch.ones_like(at, dtype=torch.bool))
            told = told.view_as(played.as_sent).flatten(0, 2)[chosen]
            told[..., tried] = sent[chosen][..., tried]
            extra = {**{name: value[chosen] for name, value in rows.items()}, "inputs": told}
            rows = {name: torch.cat([value, extra[name]]) for name, value in rows.items()}
            seed = torch.cat([seed, seed[chosen]])
            for place in chosen.tolist():
                name = f"{names[place]} back"
                results[name] = replace(results[names[place]], mode=Mode.of(memory=True, off_policy=True))
                advantages[name] = 0.0
                distilled.add(name)
                names.append(name)
                groups.append(groups[place])
        batch = self._batch(rows, names, groups, seed)
        _set_advantages(batch, results, advantages)
        if algorithm.distills:
            batch.batch["advantage"][batch.batch["off_policy"]] = 0.0
            batch.batch["distilled"] = torch.tensor([name in distilled for name in names])
            teachers = batch.batch["distilled"][:, None, None]
            said = one_hot(rows["doors"]).log() if algorithm.off_policy_loss == "imitation" else rows["old"]
            batch.batch["teacher_log_probs"] = torch.where(teachers, said, -math.inf)
        if algorithm.off_policy_old_log_probs == "tip-free":
            with torch.no_grad():
                now = self._log_probs(self.net, batch).gather(-1, batch.batch["responses"].unsqueeze(-1)).squeeze(-1)
            off_policy = batch.batch["off_policy"].unsqueeze(-1)
            batch.batch["old_log_probs"] = torch.where(off_policy, now, batch.batch["old_log_probs"])
        learning = (batch.batch["advantage"] != 0) | batch.batch["distilled"]
        self._idle.append(1 - len({groups[row] for row in learning.nonzero().flatten().tolist()}) / len(set(groups)))
        return batch, results

    def _batch(
        self, rows: dict[str, torch.Tensor], names: list[str], groups: list[str], seed: torch.Tensor
    ) -> DataProto:
        """Return rows as the trainer has them: a prompt of one token, and a token for each decision."""
        count, length = rows["doors"].shape
        chosen = rows["old"].gather(-1, rows["doors"].unsqueeze(-1)).squeeze(-1)
        tensors = {
            "prompts": torch.zeros(count, 1, dtype=torch.long),
            "responses": rows["doors"],
            "response_mask": rows["mask"].long(),
            "attention_mask": torch.ones(count, 1 + length, dtype=torch.long),
            "old_log_probs": chosen,
            "rollout_log_probs": chosen,
            "inputs": rows["inputs"],
            "seed": seed,
            "first_index": torch.arange(count) * length,
        }
        return DataProto(
            batch=TensorDict(tensors, batch_size=count),
            non_tensor_batch={"rollout_id_list": np.array(names), "data_id_list": np.array(groups)},
        )

    def _log_probs(self, net: Net, batch: DataProto) -> torch.Tensor:
        """Return log π of every door in each row, [rows, decisions, doors]; a row is read by its seed's weights."""
        seed, inputs = batch.batch["seed"], batch.batch["inputs"]
        order = seed.argsort(stable=True)
        counts = torch.bincount(seed, minlength=self._seeds)
        place = torch.arange(len(seed)) - (counts.cumsum(0) - counts)[seed[order]]
        padded = torch.zeros(self._seeds, int(counts.max()), *inputs.shape[1:])
        padded[seed[order], place] = inputs[order]
        return net.log_probs(padded)[seed[order], place][order.argsort()]

    def _update(self, batch: DataProto) -> None:
        """Take the step's optimizer steps: the project's plan of each seed, and its loss of all seeds at once."""
        algorithm, held = self._algorithm, torch.zeros(len(batch), dtype=torch.bool)
        if self._config.use_kl_loss:
            with_tips = batch.batch["memory"] & ~batch.batch["off_policy"]
            held = with_tips if algorithm.kl_rows != "all" else torch.ones_like(held)
            with torch.no_grad():
                start = self._log_probs(self._start, batch)
            batch.batch["ref_log_prob"] = start.gather(-1, batch.batch["responses"].unsqueeze(-1)).squeeze(-1)
        batch.batch["held"] = held
        groups, of_seed = batch.non_tensor_batch["data_id_list"], list[list[int]]([[] for _ in range(self._seeds)])
        for row, seed in enumerate(batch.batch["seed"].tolist()):
            of_seed[seed].append(row)
        parts: list[list[int]] = [[] for _ in range(algorithm.updates_per_step)]
        for rows in of_seed:
            for part, chosen in zip(parts, plan_updates(groups[rows].tolist(), len(parts)), strict=True):
                part += [rows[place] for place in chosen]
        for part in parts * algorithm.update_epochs:
            one = batch.select_idxs(part)
            one.batch["advantages"] = one.batch["advantage"].unsqueeze(-1) * one.batch["response_mask"]
            planned, _ = planned_batch(one, updates=1, ranks=1, micro_batch=1, other_terms=one.batch["held"])
            weight, advantage = planned.batch["token_weight"], planned.batch["advantage"]
            planned.batch["advantages"] = (weight * advantage).unsqueeze(-1) * planned.batch["response_mask"]
            self._optimize(planned)

    def _optimize(self, planned: DataProto) -> None:
        algorithm, doors = self._algorithm, self._log_probs(self.net, planned)
        chosen = doors.gather(-1, planned.batch["responses"].unsqueeze(-1)).squeeze(-1)
        # The model's output at a position is the log-prob of the next token.
        output = {"log_probs": torch.nn.functional.pad(chosen, (0, 1)).flatten()}
        if "teacher_log_probs" in planned.batch:
            output["student_log_probs"] = torch.nn.functional.pad(doors, (0, 0, 0, 1)).flatten(0, 1)
        micro_batch = tensordict_utils.assign_non_tensor(planned.batch.clone(recurse=False), dp_size=1)
        loss, metrics = hybrid_loss(
            self._config,
            output,
            micro_batch,
            mask_threshold=0.0 if algorithm.distills else algorithm.mask_threshold,
            distillation=algorithm.distillation_coefficient,
            reverse=algorithm.off_policy_loss == "reverse-distillation",
            kl_with_tips=algorithm.kl_rows != "all",
        )
        self._optimizer.zero_grad()
        (loss * self._seeds).backward()  # a weight of the plan is a share of all seeds' rollouts
        self._optimizer.step()
        sums = {name: metrics.get(f"{name}/off_policy") for name in ("tokens", "old_kl", "masked")}
        self._sums.append(
            {name: each.aggregate() if each else 0.0 for name, each in sums.items()}
        )  # distilled: no mask

    def outcome(self, curve: np.ndarray, episodes: np.ndarray) -> Outcome:
        """Return what came of it; curve: `alone` after each step, [steps, seeds], with the episodes played by then."""
        fresh, told = (Houses(self._seeds, FRESH, self._depth, self._generator) for _ in range(2))
        told.good = one_hot(told.right)
        yes = torch.ones(self._seeds, FRESH, 1, dtype=torch.bool)
        won = []
        for _ in range(TRIALS):
            played = play(self.net, self.net, fresh, yes, ~yes, False, self._generator)
            remember(fresh, played, self._arm.false_notes, self._generator)
            won.append(played.success.float().mean((1, 2)).numpy())
        quarters = [self._sums[len(self._sums) * q // 4 : len(self._sums) * (q + 1) // 4] for q in range(4)]

        def rate(name: str) -> tuple[float, ...]:
            return tuple(float(sum(e[name] for e in q) / max(sum(e["tokens"] for e in q), 1)) for q in quarters)

        reached = curve >= 0.5
        return Outcome(
            alone=curve[-1],
            noted=self.houses.solved(self.net, noted=True).mean(1).numpy(),
            found=self.houses.found.float().mean(1).numpy(),
            half=np.where(reached.any(0), episodes[reached.argmax(0)], np.nan),
            read=told.solved(self.net, noted=True).mean(1).numpy(),
            adapted=np.mean(won[-4:], axis=0),
            idle=float(np.mean(self._idle[-len(self._idle) // 4 :])) if self._idle else math.nan,
            gap=rate("old_kl"),
            masked=rate("masked"),
        )


def _set_advantages(batch: DataProto, results: Mapping[str, RolloutResult], advantages: Mapping[str, float]) -> None:
    """Put each rollout's advantage and mode on its row; in place."""
    names = batch.non_tensor_batch["rollout_id_list"].tolist()
    batch.batch["advantage"] = torch.tensor([advantages[name] for name in names])
    batch.batch["off_policy"] = torch.tensor([results[name].tip_free for name in names])
    batch.batch["memory"] = torch.tensor([results[name].mode.memory for name in names])
    batch.batch["distilled"] = torch.zeros(len(names), dtype=torch.bool)


def better_without(results: Mapping[str, RolloutResult]) -> set[str]:
    """Return the successes without notes of groups in which rollouts with notes do worse."""
    halves: dict[str, tuple[list[str], list[str]]] = {}
    for name, result in results.items():
        halves.setdefault(result.group, ([], []))[result.mode.memory].append(name)
    chosen: set[str] = set()
    for without, noted in halves.values():
        means = [np.mean([results[name].return_ for name in half]) if half else math.inf for half in (without, noted)]
        if without and means[0] > means[1]:
            chosen |= {name for name in without if results[name].return_ == 1}
    return chosen


def run(arm: Arm, rate: float, depth: int, seeds: int, tick: Callable[[], object] = lambda: None) -> Outcome:
    """Train an arm at a rate, and return what came of each seed."""
    trainer, steps = Trainer(arm, rate, depth, seeds), arm.steps
    curve = []
    for number in range(steps):
        trainer.step(number)
        curve.append(trainer.houses.solved(trainer.net, noted=False).mean(1).numpy())
        tick()
    return trainer.outcome(np.array(curve), arm.episodes * np.arange(1, steps + 1) / steps)


def _cell(values: np.ndarray, percent: bool = True) -> str:
    """Return the mean and half of its 95 % interval over seeds."""
    known = values[~np.isnan(values)]
    if len(known) < 0.9 * len(values):
        return "-"  # a mean over those seeds alone that came so far would flatter
    factor, half = 100 if percent else 1, 1.96 * known.std(ddof=1) / len(known) ** 0.5
    return f"{factor * known.mean():.0f} ± {factor * half:.0f}"


def table(suite: str, world: str, seeds: int, best: Mapping[str, tuple[float, Outcome]]) -> Table:
    made = Table(title=f"{suite}, {world} world, {seeds} seeds, a toy; each arm at its best rate")
    for column in ("arm", "rate", "alone %", "found %", "half at", "noted %", "fresh: read %", "adapted %", "idle %"):
        made.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    made.add_column("gap by quarter", no_wrap=True)
    for name, (rate, it) in best.items():
        cells = [_cell(it.alone), _cell(it.found), _cell(it.half, percent=False)]
        cells += [_cell(each) for each in (it.noted, it.read, it.adapted)] + [f"{100 * it.idle:.0f}"]
        made.add_row(name, f"{rate:g}", *cells, " ".join(f"{gap:.2f}" for gap in it.gap) if any(it.gap) else "")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, action="append", help="all by default")
    parser.add_argument("--world", choices=DEPTHS, action="append", help="both by default")
    parser.add_argument("--arm", default="*", metavar="PATTERN", help="arms whose names fit, as in a shell")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--output", type=Path, metavar="FILE", help="add a line of JSON for each arm and rate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=None if Console().is_terminal else 170)
    for suite, world in itertools.product(arguments.suite or SUITES, arguments.world or DEPTHS):
        arms = {name: arm for name, arm in SUITES[suite].items() if fnmatch.fnmatch(name, arguments.arm)}
        best: dict[str, tuple[float, Outcome]] = {}
        with Progress(console=Console(stderr=True), transient=True) as progress:
            total = sum(len(arm.rates) * arm.steps for arm in arms.values())
            task = progress.add_task(f"{suite}, {world}", total=total)
            for name, rate in ((name, rate) for name, arm in arms.items() for rate in arm.rates):
                it = run(arms[name], rate, DEPTHS[world], arguments.seeds, partial(progress.advance, task))
                if name not in best or it.alone.mean() > best[name][1].alone.mean():
                    best[name] = rate, it
                if arguments.output:
                    line = {"suite": suite, "world": world, "arm": name, "rate": rate, "seeds": arguments.seeds}
                    numbers = {key: _rounded(value) for key, value in vars(it).items()}
                    arguments.output.parent.mkdir(parents=True, exist_ok=True)
                    with arguments.output.open("a") as file:
                        file.write(json.dumps(line | numbers) + "\n")
        if best:
            console.print(table(suite, world, arguments.seeds, best))


def _rounded(values: np.ndarray | float | Sequence[float]) -> Any:
    """Return numbers as JSON has them, NaN as null."""
    if isinstance(values, int | float):
        return None if math.isnan(values) else round(values, 4)
    return [_rounded(float(value)) for value in values]


if __name__ == "__main__":
    main()
