"""From drawn modes to training rows: what the trainer does with rollouts before and after they are played."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from agentlightning.hooks import RolloutHooks
from agentlightning.schemas import RolloutCreate, RolloutState
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout, EnqueuedRollout

from empo2.recipe.config import Algorithm
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.protocol import scope_of

MEMORY, NO_MEMORY = "memory", "no-memory"
ON_POLICY, OFF_POLICY = "on-policy", "off-policy"
CALL_EVENT = "empo2_call"

_TAG = "_empo2"  # column that carries a task's tag to the rollouts' metadata


@dataclass(frozen=True)
class Mode:
    """How a rollout is played and how it is learned from."""

    rollout: str
    update: str


def draw_modes(algorithm: Algorithm, step: int, groups: int) -> list[Mode]:
    """One mode for each of the step's ``groups``; the same for the same seed and step, in whatever run.

    Memory with probability p; given memory, off-policy with probability q (paper, section on the hybrid update). All
    rollouts of a group are compared with each other, so they share a mode.
    """
    if algorithm.name == "grpo":
        return [Mode(NO_MEMORY, ON_POLICY)] * groups
    generator = np.random.default_rng((algorithm.seed, step))
    draws = 1 if algorithm.mode_per == "step" else groups
    modes = []
    for _ in range(draws):
        memory, off_policy = generator.random(2) < (algorithm.memory_probability, algorithm.off_policy_probability)
        modes.append(Mode(MEMORY, OFF_POLICY if off_policy else ON_POLICY) if memory else Mode(NO_MEMORY, ON_POLICY))
    return modes * (groups // draws)


@dataclass
class Outcomes:
    """What became of one step's rollouts; means over the rollouts that are trained on."""

    dropped: Counter[str] = field(default_factory=Counter)
    turns_dropped: int = 0
    modes: dict[str, Mode] = field(default_factory=dict)
    returns: dict[str, float] = field(default_factory=dict)
    intrinsic: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def drop(self, rollout: CompletedRollout, reason: str) -> None:
        self.dropped[reason] += 1
        self.errors.append(rollout.error_message or reason.replace("_", " "))
        for values in (self.modes, self.returns, self.intrinsic):
            values.pop(rollout.rollout_id, None)


class _TagRequests(RolloutHooks):
    """Moves the tag from a request's input, where the manager can put it, to its metadata."""

    def __init__(self, hooks: RolloutHooks | None) -> None:
        self._hooks = hooks

    def on_enqueue(self, request: RolloutCreate) -> RolloutCreate:
        tag = request.input.pop(_TAG)
        if self._hooks is not None:
            request = self._hooks.on_enqueue(request)
        metadata = request.metadata if isinstance(request.metadata, dict) else dict(request.metadata or {})
        return request.model_copy(update={"metadata": {**metadata, "empo2": tag}})


class Empo2RolloutManager(AglRolloutManager):
    """agent-lightning's manager, which tags rollouts and hands back only those that can be trained on.

    ``begin`` must be called once before ``enqueue_and_wait_until_completed``.
    """

    def begin(self, algorithm: Algorithm, scope_fields: Sequence[str], drain_seconds: float) -> None:
        """Settings of this step; ``drain_seconds`` is how long the last reflections are waited for."""
        self._algorithm = algorithm
        self._scope_fields = scope_fields
        self._drain_seconds = drain_seconds
        self.outcomes = Outcomes()
        self.gateway_metrics: dict[str, float] = {}

    def _create_rollouts(self, data: dict[str, Any], *, is_train: bool) -> list[EnqueuedRollout]:
        if not is_train or self._algorithm.name == "grpo":
            return super()._create_rollouts(data, is_train=is_train)
        tasks = [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]
        modes = draw_modes(self._algorithm, self._step, len(tasks))
        tags = [
            {"rollout_mode": mode.rollout, "update_mode": mode.update, "scope": scope_of(task, self._scope_fields)}
            for mode, task in zip(modes, tasks, strict=True)
        ]
        hooks, self._hooks = self._hooks, _TagRequests(self._hooks)
        try:
            return super()._create_rollouts({**data, _TAG: tags}, is_train=True)
        finally:
            self._hooks = hooks

    def _build_completed_rollout(self, enqueued_rollout: EnqueuedRollout, rollout: Any) -> CompletedRollout:
        if getattr(rollout.metadata, "empo2", None):
            # The gateway embeds some states after the reply has gone out: their events must be there to be read.
            self.client.post(f"/empo2/rollouts/{enqueued_rollout.rollout_id}/settle").raise_for_status()
        return super()._build_completed_rollout(enqueued_rollout, rollout)

    def enqueue_and_wait_until_completed(self, data: dict[str, Any], *, is_train: bool) -> list[CompletedRollout]:
        """Play the rollouts and return the usable ones, ready for agent-lightning's adapter.

        Raises:
            NoUsableRollouts: none is left; the message says why.
        """
        played = super().enqueue_and_wait_until_completed(data, is_train=is_train)
        drained = self.client.post("/empo2/drain", json={"timeout": self._drain_seconds}, timeout=None)
        drained.raise_for_status()
        self.gateway_metrics = drained.json()
        usable = [kept for rollout in played if (kept := self._usable(rollout, is_train)) is not None]
        if is_train:
            usable = self._without_lonely(usable)
        if not usable:
            raise NoUsableRollouts(_why_none(self.outcomes, len(played)))
        return usable

    def _usable(self, rollout: CompletedRollout, is_train: bool) -> CompletedRollout | None:
        reason = _unusable(rollout, is_train)
        if reason:
            self.outcomes.drop(rollout, reason)
            return None
        assert rollout.final_reward is not None
        if not is_train:
            self.outcomes.returns[rollout.rollout_id] = rollout.final_reward
            return rollout
        trained, intrinsic, turns_dropped = prepare_for_training(rollout)
        self.outcomes.turns_dropped += turns_dropped
        if not trained.triplets:
            self.outcomes.drop(rollout, "no_tip_free_prompt")
            return None
        tag = rollout.metadata.get("empo2")
        self.outcomes.modes[rollout.rollout_id] = (
            Mode(tag["rollout_mode"], tag["update_mode"]) if tag else Mode(NO_MEMORY, ON_POLICY)
        )
        self.outcomes.returns[rollout.rollout_id] = rollout.final_reward
        self.outcomes.intrinsic[rollout.rollout_id] = intrinsic
        scale, coefficient = self._algorithm.return_scale, self._algorithm.intrinsic_coefficient
        return trained.model_copy(update={"final_reward": scale * (rollout.final_reward + coefficient * intrinsic)})

    def _without_lonely(self, rollouts: list[CompletedRollout]) -> list[CompletedRollout]:
        """A group of one would get its raw score as advantage (verl's grpo: mean 0, std 1)."""
        groups: dict[str, list[CompletedRollout]] = defaultdict(list)
        for rollout in rollouts:
            groups[rollout.data_id].append(rollout)
        for group in groups.values():
            if len(group) == 1:
                self.outcomes.drop(group[0], "alone_in_group")
        return [rollout for rollout in rollouts if len(groups[rollout.data_id]) > 1]


def _unusable(rollout: CompletedRollout, is_train: bool) -> str | None:
    if rollout.rollout_state != RolloutState.SUCCEEDED:
        return "failed"
    if not rollout.triplets:
        return "no_model_call"
    if rollout.final_reward is None or not np.isfinite(rollout.final_reward):
        return "no_reward"
    if is_train:
        for triplet in rollout.triplets:
            log_probs = triplet.response["log_probs"]
            # One row without them would cost the whole batch its rollout_log_probs (RolloutAdapter).
            if log_probs is None or len(log_probs) != len(triplet.response["token_ids"]):
                return "no_log_probs"
    return None


def prepare_for_training(rollout: CompletedRollout) -> tuple[CompletedRollout, float, int]:
    """Give an off-policy rollout its tip-free prompts, and sum a rollout's intrinsic rewards.

    Only prompts change: vLLM's log-probs, taken *with* the tips, stay, so that in agent-lightning's batch π_old is
    tip-conditioned and π_θ is not. A turn whose tip-free prompt is not known is left out, never trained with its tips.

    Returns:
        The rollout to train on, Σ 1/n over its calls, and the number of turns left out.
    """
    calls = {
        tuple(event["data"]["prompt_token_ids"]): event["data"]
        for event in rollout.events
        if event["event_type"] == CALL_EVENT
    }
    off_policy = rollout.metadata.get("empo2", {}).get("update_mode") == OFF_POLICY
    triplets, intrinsic = [], 0.0
    assert rollout.triplets is not None
    for triplet in rollout.triplets:
        call = calls.get(tuple(triplet.prompt["token_ids"]), {})
        intrinsic += call.get("intrinsic_reward", 0.0)
        if off_policy:
            tip_free = call.get("tip_free_prompt_token_ids")
            if tip_free is None:
                continue
            triplet = triplet.model_copy(update={"prompt": {**triplet.prompt, "token_ids": tip_free}})
        triplets.append(triplet)
    left_out = len(rollout.triplets) - len(triplets)
    return rollout.model_copy(update={"triplets": triplets}), intrinsic, left_out


def _why_none(outcomes: Outcomes, played: int) -> str:
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in outcomes.dropped.most_common())
    example = Counter(outcomes.errors).most_common(1)[0][0] if outcomes.errors else "no rollout was played"
    return f"none of {played} rollouts can be used: {reasons} (for example: {example}; see controller.log)"
