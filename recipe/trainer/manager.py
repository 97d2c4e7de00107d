"""agent-lightning's rollout manager with EMPO²'s tags; it returns only rollouts that can be trained on."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from agentlightning.hooks import RolloutHooks
from agentlightning.schemas import Rollout, RolloutCreate
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout, EnqueuedRollout

from empo2.recipe.config import Algorithm, Settings
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.failures import FAILED_BY_AGENT
from empo2.recipe.protocol import TAG, Mode, RolloutTag, scope_of
from empo2.recipe.trainer.gateway_client import GatewayClient
from empo2.recipe.trainer.results import (
    RolloutResult,
    StepResults,
    agent_metrics,
    failure,
    prepare_for_training,
    unusable,
)


def draw_modes(algorithm: Algorithm, step: int) -> Iterator[Mode]:
    """Yield the modes of a step's groups without end; equal seeds and steps give equal modes in every run.

    Memory with probability p; given memory, off-policy with probability q (paper, section on the hybrid update). All
    rollouts of a group are compared with each other, so they share a mode.
    """
    generator = np.random.default_rng((algorithm.seed, step))

    def draw() -> Mode:
        if algorithm.name == "grpo":
            return Mode.of(memory=False)
        memory, off_policy = generator.random(2) < (algorithm.memory_probability, algorithm.off_policy_probability)
        return Mode.of(memory=bool(memory), off_policy=bool(off_policy))

    if algorithm.mode_per == "step":
        yield from itertools.repeat(draw())
    while True:
        yield draw()


class TagRequests(RolloutHooks):
    """Hook that writes each training rollout's tag into its metadata, after the user's own hooks.

    agent-lightning requests the rollouts of a step group by group; ``modes`` yields one for each rollout in that order.
    """

    def __init__(self, hooks: RolloutHooks | None, modes: Iterator[Mode], scope_fields: list[str]) -> None:
        self._hooks = hooks or RolloutHooks()
        self._modes = modes
        self._scope_fields = scope_fields

    def on_enqueue(self, request: RolloutCreate) -> RolloutCreate:
        task = dict(request.input)
        request = self._hooks.on_enqueue(request)
        if not request.is_train:
            return request
        tag = RolloutTag(**next(self._modes).model_dump(), scope=scope_of(task, self._scope_fields))
        metadata = request.metadata if isinstance(request.metadata, dict) else dict(request.metadata or {})
        return request.model_copy(update={"metadata": {**metadata, TAG: tag.model_dump()}})

    def on_succeeded(self, rollout: Rollout, events: dict[str, list[Any]], store: Any) -> None:
        self._hooks.on_succeeded(rollout, events, store)

    def on_failed(self, rollout: Rollout, store: Any) -> None:
        self._hooks.on_failed(rollout, store)


class Empo2RolloutManager(AglRolloutManager):
    """agent-lightning's manager that tags rollouts and returns only those that can be trained on.

    Args:
        gateway: asked to complete the events of a rollout, and to finish its reflections.
        group_size: rollouts of a training task; agent-lightning's ``train_rollout_n`` is not read.
        step: the training step, from which the modes are drawn.
        hooks: the user's own.
        others: agent-lightning's further arguments.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        gateway: GatewayClient,
        group_size: int,
        step: int,
        hooks: RolloutHooks | None = None,
        **others: Any,
    ) -> None:
        algorithm = settings.algorithm
        modes = (mode for mode in draw_modes(algorithm, step) for _ in range(group_size))
        tagging = TagRequests(hooks, modes, settings.memory.scope) if algorithm.name == "empo2" else hooks
        super().__init__(**others | {"step": step, "train_rollout_n": group_size, "hooks": tagging})
        self._has_user_hooks = hooks is not None
        self._settings = settings
        self._gateway = gateway
        self.results = StepResults()
        self.gateway_metrics: dict[str, float] = {}

    def _run_succeeded_hook(self, rollout: Rollout) -> None:
        if self._has_user_hooks:  # agent-lightning would read all events of a rollout for it
            super()._run_succeeded_hook(rollout)

    def _build_completed_rollout(self, enqueued_rollout: EnqueuedRollout, rollout: Rollout) -> CompletedRollout:
        if RolloutTag.read(rollout.metadata) is not None:
            # The gateway embeds some states after the reply was sent: wait until their events are recorded.
            self._gateway.settle(enqueued_rollout.rollout_id)
        return super()._build_completed_rollout(enqueued_rollout, rollout)

    def enqueue_and_wait_until_completed(self, data: dict[str, Any], *, is_train: bool) -> list[CompletedRollout]:
        """Play the rollouts and return the usable ones, ready for agent-lightning's adapter.

        Raises:
            NoUsableRollouts: none is left; the message says why.
        """
        played = super().enqueue_and_wait_until_completed(data, is_train=is_train)
        self.gateway_metrics = self._gateway.drain(self._settings.reflection.timeout)
        select = self._trainable if is_train else self._validated
        usable = [kept for rollout in played if (kept := select(rollout)) is not None]
        if is_train:
            usable = self._drop_groups_of_one(usable)
        if not usable:
            raise NoUsableRollouts(self.results.why_none())
        return usable

    def _validated(self, rollout: CompletedRollout) -> CompletedRollout | None:
        """Store and return the result of a validation rollout; None if it has none."""
        if reason := failure(rollout) or unusable(rollout, is_train=False):
            self.results.drop(rollout, reason)
            return None
        assert rollout.final_reward is not None
        self.results.kept[rollout.rollout_id] = RolloutResult(
            rollout.data_id, Mode.of(memory=False), rollout.final_reward, agent_metrics=agent_metrics(rollout)
        )
        return rollout

    def _trainable(self, rollout: CompletedRollout) -> CompletedRollout | None:
        """Store a rollout's result; return the rollout to train on, with its raw return, or None if it is dropped."""
        reason = failure(rollout)
        given = self._settings.algorithm.failed_rollout_return
        if reason == FAILED_BY_AGENT and given is not None:
            reason, rollout = None, rollout.model_copy(update={"final_reward": given})
        if reason := reason or unusable(rollout, is_train=True):
            self.results.drop(rollout, reason)
            return None
        trained, intrinsic, turns_dropped = prepare_for_training(rollout)
        self.results.turns_dropped += turns_dropped
        if not trained.triplets:
            self.results.drop(rollout, "no_tip_free_prompt")
            return None
        tag = RolloutTag.read(rollout.metadata)
        assert rollout.final_reward is not None
        self.results.kept[rollout.rollout_id] = RolloutResult(
            group=rollout.data_id,
            mode=tag.mode if tag else Mode.of(memory=False),
            return_=rollout.final_reward,
            intrinsic=intrinsic,
            reply_tokens=sum(len(triplet.response["token_ids"]) for triplet in trained.triplets),
            agent_metrics=agent_metrics(rollout),
        )
        return trained

    def _drop_groups_of_one(self, rollouts: list[CompletedRollout]) -> list[CompletedRollout]:
        """Drop rollouts that are alone in their group: verl would use their raw score as their advantage."""
        sizes = Counter(rollout.data_id for rollout in rollouts)
        for rollout in rollouts:
            if sizes[rollout.data_id] == 1:
                self.results.drop(rollout, "alone_in_group")
        return [rollout for rollout in rollouts if sizes[rollout.data_id] > 1]
