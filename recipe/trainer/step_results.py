"""The results of a step's rollouts: which are trained on, which are dropped, and why."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from agentlightning.schemas import RolloutState
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet

from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.failures import FAILED_BY_AGENT, cause_of_failure, error_of, reported_error, reported_metrics
from empo2.recipe.protocol import PANEL, Mode, RolloutTag
from empo2.recipe.trainer.rollout_calls import PlayedCall, calls_of, main_calls, rows_of, turns_of


@dataclass(frozen=True)
class RolloutResult:
    """One rollout that is trained on or validated."""

    group: str  # rollouts of one task share it (agent-lightning's ``data_id``)
    mode: Mode  # its mode (see `Mode`)
    return_: float  # the environment's return, in its own units
    intrinsic: float = 0.0  # sum of 1/n over the turns of the rollout
    reply_tokens: int = 0  # tokens that the policy sampled in its turns, before any row is cut or left out
    panel: str = ""  # name of the set of validation tasks that it belongs to; "" for none
    # Numbers by name that the agent reported beside its reward.
    agent_metrics: Mapping[str, float] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)  # its input
    tips: Sequence[int] = ()  # ids of the tips that it was shown, in their order
    versions: Sequence[int] = ()  # those of the weights that sampled its turns (updates before them), ascending
    # The turns of each training row, by their numbers among its calls (`PlayedCall`).
    rows: Sequence[Sequence[int]] = ()
    held: bool = False  # off-policy, but its rows have its tips: for the KL to the first weights alone

    @property
    def tip_free(self) -> bool:
        """Return whether its rows are without the tips that it was shown."""
        return self.mode.off_policy and not self.held


@dataclass(frozen=True)
class DroppedRollout:
    """One rollout that is not used."""

    reason: str  # such as ``failed_by_agent``
    error: str  # what happened, in one line; "" if that is the reason already
    # Both as in `RolloutResult`.
    panel: str
    mode: Mode


type Results = Mapping[str, RolloutResult]
"""By rollout id."""


class Unusable(Exception):
    """A rollout that is not used, by `DroppedRollout`'s ``reason``, and ``error`` where the rollout does not say it."""

    def __init__(self, reason: str, error: str = "") -> None:
        super().__init__(reason, error)
        self.reason, self.error = reason, error


@dataclass
class StepResults:
    """The results of one step's rollouts."""

    max_prompt_tokens: float = math.inf  # of a training row's prompt
    # Given to training rollouts that failed by their agent; None to leave them out.
    failed_rollout_return: float | None = None
    main_chat_only: bool = True  # False if the user's rules choose the calls that are trained
    vocabulary: float = math.inf  # the model's number of tokens
    # Both by rollout id.
    kept: dict[str, RolloutResult] = field(default_factory=dict)
    dropped: dict[str, DroppedRollout] = field(default_factory=dict)
    # What is not trained of the rollouts: of ``turns_dropped`` the tip-free prompt, the log-probs or the tokens are not
    # known, ``side_calls_dropped`` stand beside the main chat (see `main_calls`), ``repeated_calls`` are requests that
    # were sent again (see `turns_of`), ``image_calls`` have images, ``overlong_rows`` have a prompt that is too long.
    left_out: Counter[str] = field(default_factory=Counter)
    calls: dict[str, list[PlayedCall]] = field(default_factory=dict)  # of all rollouts that were played, by id

    @property
    def reasons(self) -> Counter[str]:
        """Return the number of dropped rollouts by reason."""
        return Counter(each.reason for each in self.dropped.values())

    def answered(self, rollout: str) -> list[PlayedCall]:
        """Return the calls of a rollout that have a reply, by their numbers."""
        return [call for call in self.calls[rollout] if call.reply]

    def main(self, rollout: str) -> list[PlayedCall]:
        """Return the answered calls of a rollout without those beside its main chat, unless the user's rules choose."""
        answered = self.answered(rollout)
        return main_calls(answered) if self.main_chat_only else answered

    def turns(self, rollout: str) -> list[PlayedCall]:
        """Return the turns of a rollout, also those that are left out; see `turns_of`."""
        return turns_of(self.main(rollout))

    def usable(self, played: Sequence[CompletedRollout], *, is_train: bool) -> list[CompletedRollout]:
        """Keep or drop each rollout, and return what agent-lightning gets: to train on, or for its validation metrics.

        Those metrics are about the policy alone, without memory. Training rollouts that are alone in their group are
        dropped, since verl would use a lone rollout's raw score as its advantage.

        Raises:
            NoUsableRollouts: none is left; the message says why.
        """
        usable = []
        for rollout in played:
            if rollout.rollout_id in self.dropped:
                continue
            try:
                if is_train:
                    usable.append(self.train(rollout))
                elif not self.validate(rollout).mode.memory:
                    triplets = [call.triplet() for call in self.answered(rollout.rollout_id)]
                    usable.append(rollout.model_copy(update={"triplets": triplets}))
            except Unusable as why:
                self.drop(rollout, why.reason, why.error)
            except Exception as error:  # the calls and events of others: none of them ends the run
                self.drop_unreadable(rollout, error)
        if is_train:
            sizes = Counter(rollout.data_id for rollout in usable)
            for rollout in usable:
                if sizes[rollout.data_id] == 1:
                    self.drop(rollout, "alone_in_group")
            usable = [rollout for rollout in usable if sizes[rollout.data_id] > 1]
        if not usable:
            reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in self.reasons.most_common())
            errors = Counter(each.error for each in self.dropped.values() if each.error).most_common(1)
            example = f"for example: {errors[0][0]}; " if errors else ""
            raise NoUsableRollouts(
                f"none of {len(self.dropped)} rollouts can be used: {reasons or 'none was played'} ({example}see "
                "controller.log)"
            )
        return usable

    def validate(self, rollout: CompletedRollout) -> RolloutResult:
        """Keep and return the result of a validation rollout.

        Raises:
            Unusable: it has none.
        """
        calls = self.calls[rollout.rollout_id] = calls_of(rollout.events, self.vocabulary)
        result = self.kept[rollout.rollout_id] = RolloutResult(
            group=rollout.data_id,
            mode=mode_of(rollout),
            return_=_return_of(rollout, calls, None),
            panel=panel_of(rollout),
            agent_metrics=reported_metrics(rollout.events),
        )
        return result

    def train(self, rollout: CompletedRollout) -> CompletedRollout:
        """Keep the result of a training rollout, and return the rollout with the turns that are trained.

        A turn whose log-probs are not known is left out, and of an off-policy update one whose tip-free prompt is not
        known: it is never trained with its tips, but for the KL (`hold_untaught`).

        Raises:
            Unusable: it cannot be trained on.
        """
        mode, calls = mode_of(rollout), calls_of(rollout.events, self.vocabulary)
        self.calls[rollout.rollout_id] = calls
        return_ = _return_of(rollout, calls, self.failed_rollout_return)
        answered, main, turns = (of(rollout.rollout_id) for of in (self.answered, self.main, self.turns))
        texts = [turn for turn in turns if not turn.has_images]
        sampled = [turn for turn in texts if turn.log_probs is not None]  # one without would cost all rows theirs
        known = [each for turn in sampled if (each := turn.as_trained(mode)) is not None]
        rows = rows_of(known)
        fitting = self._fitting(rows)
        self.left_out["side_calls_dropped"] += len(answered) - len(main)
        self.left_out["repeated_calls"] += len(main) - len(turns)
        self.left_out["image_calls"] += len(turns) - len(texts)
        self.left_out["turns_dropped"] += len(texts) - len(known) + sum(call.without_tokens for call in calls)
        self.left_out["overlong_rows"] += len(rows) - len(fitting)
        if turns and not texts:
            raise Unusable("images", "every call has an image, and calls with images are not trained")
        if not sampled:
            raise Unusable("no_log_probs")
        if not known:
            raise Unusable("no_tip_free_prompt")
        if not fitting:
            raise Unusable("overlong", f"its prompt exceeds model.max_prompt_tokens={self.max_prompt_tokens}")
        self.kept[rollout.rollout_id] = RolloutResult(
            group=rollout.data_id,
            mode=mode,
            return_=return_,
            intrinsic=sum(turn.intrinsic for turn in turns),
            reply_tokens=sum(len(turn.reply) for turn in known),
            agent_metrics=reported_metrics(rollout.events),
            task=rollout.input or {},
            tips=list(dict.fromkeys(tip for call in calls if call.event for tip in call.event.tip_ids)),
            versions=sorted({call.data.get("server", {}).get("version") for call in answered} - {None}),
            rows=_numbers(fitting),
        )
        return rollout.model_copy(update={"triplets": _triplets(fitting), "final_reward": return_})

    def hold_untaught(self, rollouts: Sequence[CompletedRollout], taught: Collection[str]) -> list[CompletedRollout]:
        """Return the rollouts that are trained; hold the off-policy ones that are not taught, with the tips they had.

        One whose prompts with tips are all too long stays as it is.
        """
        made = []
        for rollout in rollouts:
            result = self.kept[rollout.rollout_id]
            if result.mode.off_policy and rollout.rollout_id not in taught:
                turns = [
                    turn
                    for turn in self.turns(rollout.rollout_id)
                    if not turn.has_images and turn.log_probs is not None
                ]
                if fitting := self._fitting(rows_of(turns)):
                    sampled = sum(len(turn.reply) for turn in turns)
                    held = replace(result, held=True, reply_tokens=sampled, rows=_numbers(fitting))
                    self.kept[rollout.rollout_id] = held
                    rollout = rollout.model_copy(update={"triplets": _triplets(fitting)})
            made.append(rollout)
        return made

    def _fitting(self, rows: list[list[PlayedCall]]) -> list[list[PlayedCall]]:
        return [row for row in rows if len(row[0].prompt) <= self.max_prompt_tokens]

    def drop(self, rollout: CompletedRollout, reason: str, error: str = "") -> None:
        """Note that a rollout is not used, and forget its result."""
        self.kept.pop(rollout.rollout_id, None)
        self.calls.setdefault(rollout.rollout_id, [])
        said = str(error or reported_error(rollout.events) or rollout.error_message or "")
        self.dropped[rollout.rollout_id] = DroppedRollout(reason, said, panel_of(rollout), mode_of(rollout))

    def drop_unreadable(self, rollout: CompletedRollout, error: Exception) -> None:
        """Drop a rollout whose calls, events or reward cannot be read."""
        self.drop(rollout, "unreadable", str(error_of(error)))


def _numbers(rows: Sequence[Sequence[PlayedCall]]) -> list[list[int]]:
    return [[turn.number for turn in row] for row in rows]


def _triplets(rows: Sequence[Sequence[PlayedCall]]) -> list[Triplet]:
    return [turn.triplet() for row in rows for turn in row]


def groups_of(results: Results) -> list[Results]:
    """Return the results of each group."""
    groups: defaultdict[str, dict[str, RolloutResult]] = defaultdict(dict)
    for rollout, result in results.items():
        groups[result.group][rollout] = result
    return list(groups.values())


def staleness(results: Results, version: int) -> dict[str, float]:
    """Return how many updates lie between the first weights that sampled a trained rollout and these (docs/async.md).

    Args:
        version: of the weights that are about to be updated (updates before them).
    """
    sampled = [result.versions for result in results.values() if result.versions]
    ages = [version - versions[0] for versions in sampled] or [0]
    return {
        "empo2/staleness_mean": float(np.mean(ages)),
        "empo2/staleness_max": float(max(ages)),
        "empo2/rollouts_of_several_versions": float(sum(len(versions) > 1 for versions in sampled)),
    }


def mode_of(rollout: CompletedRollout) -> Mode:
    """Return a rollout's mode; without a tag it is one without memory."""
    tag = RolloutTag.read(rollout.metadata)
    return tag.mode if tag else Mode.of(memory=False)


def panel_of(rollout: CompletedRollout) -> str:
    """Return the field ``panel`` of a rollout's task; "" if it has none."""
    return str((rollout.input or {}).get(PANEL) or "")


def _return_of(rollout: CompletedRollout, calls: Sequence[PlayedCall], failed_rollout_return: float | None) -> float:
    """Return what a rollout earned; raise `Unusable` if nothing is known of it."""
    answered = any(call.reply for call in calls)
    if rollout.rollout_state != RolloutState.SUCCEEDED:
        cause = cause_of_failure(rollout.error_message, [call.data for call in calls], answered=answered)
        if cause != FAILED_BY_AGENT or failed_rollout_return is None:
            raise Unusable(cause)
        return failed_rollout_return
    if not answered:
        raise Unusable("no_model_call")
    if rollout.final_reward is None or not math.isfinite(rollout.final_reward):
        raise Unusable("no_reward")
    return rollout.final_reward
