"""The results of a step's rollouts: which are trained on, which are dropped, and why."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from agentlightning.schemas import RolloutState
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet

from empo2.recipe.failures import cause_of_failure, numbers_of, reported_error
from empo2.recipe.protocol import CALL_EVENT, PANEL, CallEvent, Mode, RolloutTag


@dataclass(frozen=True)
class RolloutResult:
    """One rollout that is trained on or validated.

    Attributes:
        group: rollouts of one task share it (agent-lightning's ``data_id``).
        mode: its mode (see `Mode`).
        return_: the environment's return, in its own units.
        intrinsic: sum of 1/n over the rollout's calls.
        reply_tokens: tokens that the policy sampled, before any row is cut.
        panel: name of the set of validation tasks that it belongs to; "" for none.
        agent_metrics: numbers by name that the agent reported beside its reward.
        task: its input.
        tips: ids of the tips that it was shown, in their order.
        versions: those of the weights that sampled its turns (updates before them), ascending.
    """

    group: str
    mode: Mode
    return_: float
    intrinsic: float = 0.0
    reply_tokens: int = 0
    panel: str = ""
    agent_metrics: Mapping[str, float] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    tips: Sequence[int] = ()
    versions: Sequence[int] = ()


@dataclass
class StepResults:
    """The results of one step's rollouts by rollout id, and counts of what was dropped.

    Attributes:
        kept: by rollout id.
        dropped: counts by reason.
        lost: the same counts by panel and by whether the rollout saw tips.
        turns_dropped: turns of kept rollouts that are not trained.
        errors: one message for each dropped rollout.
        reasons: why a rollout was dropped, by its id.
    """

    kept: dict[str, RolloutResult] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    lost: Counter[tuple[str, bool]] = field(default_factory=Counter)
    turns_dropped: int = 0
    errors: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def drop(self, rollout: CompletedRollout, reason: str) -> None:
        """Count a rollout as dropped, and forget its result."""
        self.kept.pop(rollout.rollout_id, None)
        self.dropped[reason] += 1
        self.lost[panel_of(rollout), mode_of(rollout).memory] += 1
        self.errors.append(str(reported_error(rollout.events) or rollout.error_message or reason.replace("_", " ")))
        self.reasons[rollout.rollout_id] = reason

    def why_none(self) -> str:
        """Return one line that says why none of the rollouts can be used."""
        reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in self.dropped.most_common())
        example = Counter(self.errors).most_common(1)[0][0] if self.errors else "no rollout was played"
        return (
            f"none of {self.dropped.total()} rollouts can be used: {reasons} (for example: {example}; "
            "see controller.log)"
        )


def groups_of(results: Mapping[str, RolloutResult]) -> list[list[str]]:
    """Return the rollout ids of each group."""
    groups: dict[str, list[str]] = defaultdict(list)
    for rollout, result in results.items():
        groups[result.group].append(rollout)
    return list(groups.values())


def mode_of(rollout: CompletedRollout) -> Mode:
    """Return a rollout's mode; without a tag it is one without memory."""
    tag = RolloutTag.read(rollout.metadata)
    return tag.mode if tag else Mode.of(memory=False)


def panel_of(rollout: CompletedRollout) -> str:
    """Return the field ``panel`` of a rollout's task; "" if it has none."""
    return str((rollout.input or {}).get(PANEL) or "")


def failure(rollout: CompletedRollout) -> str | None:
    """Return the cause of a rollout's failure (see `cause_of_failure`); None if it did not fail."""
    if rollout.rollout_state == RolloutState.SUCCEEDED:
        return None
    calls = [event["data"] for event in rollout.events if event["event_type"] == "model_request"]
    return cause_of_failure(rollout.error_message, calls, answered=bool(rollout.triplets))


def agent_metrics(rollout: CompletedRollout) -> dict[str, float]:
    """Return the finite numbers in ``metrics`` of a rollout's last reward event; ignore all else that stands there."""
    rewards = [event["data"] for event in rollout.events if event["event_type"] == "reward"]
    return numbers_of(rewards[-1].get("metrics")) if rewards else {}


def tips_of(rollout: CompletedRollout) -> list[int]:
    """Return the ids of the tips that a rollout was shown, in their order."""
    calls = [CallEvent.model_validate(event["data"]) for event in rollout.events if event["event_type"] == CALL_EVENT]
    return list(dict.fromkeys(tip for call in calls for tip in call.tip_ids))


def versions_of(rollout: CompletedRollout) -> list[int]:
    """Return the versions of the model servers that sampled a rollout's turns, ascending."""
    versions = {triplet.metadata.get("server", {}).get("version") for triplet in rollout.triplets or []}
    return sorted(versions - {None})


def unusable(rollout: CompletedRollout, *, is_train: bool) -> str | None:
    """Return why a rollout cannot be used; None if it can."""
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


def _calls(rollout: CompletedRollout) -> Iterator[tuple[Triplet, CallEvent | None]]:
    """Pair each turn of a rollout with the gateway's event of its call, by the prompt that was sent."""
    events = [CallEvent.model_validate(event["data"]) for event in rollout.events if event["event_type"] == CALL_EVENT]
    by_prompt = {tuple(event.prompt_token_ids): event for event in events}
    for triplet in rollout.triplets or []:
        yield triplet, by_prompt.get(tuple(triplet.prompt["token_ids"]))


def prepare_for_training(rollout: CompletedRollout) -> tuple[CompletedRollout, float, int]:
    """Give an off-policy rollout its tip-free prompts, see `trained_turns`, and sum its intrinsic rewards.

    Returns:
        The rollout to train on, the sum of 1/n over its turns, and the number of turns left out.
    """
    turns = list(trained_turns(rollout))
    triplets = [triplet for triplet, _ in turns if triplet is not None]
    intrinsic = sum(call.intrinsic_reward for _, call in turns if call is not None)
    return rollout.model_copy(update={"triplets": triplets}), intrinsic, len(turns) - len(triplets)


def trained_turns(rollout: CompletedRollout) -> Iterator[tuple[Triplet | None, CallEvent | None]]:
    """Yield each turn as it is trained, with the gateway's event; None for a turn that is left out.

    Of an off-policy rollout only prompts change. vLLM's log-probs, sampled *with* the tips, stay, so that in
    agent-lightning's batch π_old is tip-conditioned and π_θ is not. A turn whose tip-free prompt is unknown is left
    out, never trained with its tips.
    """
    off_policy = mode_of(rollout).off_policy
    for triplet, call in _calls(rollout):
        if not off_policy:
            yield triplet, call
        elif call is None or call.tip_free_prompt_token_ids is None:
            yield None, call
        else:
            prompt = {**triplet.prompt, "token_ids": call.tip_free_prompt_token_ids}
            yield triplet.model_copy(update={"prompt": prompt}), call
