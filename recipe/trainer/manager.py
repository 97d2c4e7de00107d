"""agent-lightning's rollout manager with EMPO²'s tags; it returns only rollouts that can be trained on."""

import contextlib
import functools
import itertools
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from agentlightning.hooks import RolloutHooks
from agentlightning.schemas import (
    TERMINAL_STATES,
    Event,
    Model,
    Rollout,
    RolloutConfig,
    RolloutCreate,
    RolloutLifecycleStatus,
)
from agentlightning.verl.agl_rollout_manager import (
    AglAsyncRolloutManager,
    AglRolloutManager,
    CompletedRollout,
    EnqueuedRollout,
)
from transformers import AutoConfig, PretrainedConfig

from empo2.recipe.config import Algorithm, Settings
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.failures import first_error
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.marked_lines import say_note
from empo2.recipe.protocol import CONTINUED, TAG, Mode, RolloutTag, StepProgress, scope_of, whole_events
from empo2.recipe.trainer.rollout_calls import rollout_times
from empo2.recipe.trainer.step_results import StepResults

TASK = "task"  # the one column of a batch: agent-lightning's are fields, which all tasks would have to share
_NONE_PLAYS_SECONDS = 120  # a controller asks every few seconds, and an agent may need a minute to start
_LOG_CHARACTERS = 100_000


@functools.cache
def vocabulary_of(model: str) -> int:
    """Return the number of tokens that a model can read and write, by its ``config.json`` or its class's default."""
    config, _ = PretrainedConfig.get_config_dict(model)
    written = config.get("text_config", config).get("vocab_size")
    return written or AutoConfig.from_pretrained(model).get_text_config().vocab_size


def draw_modes(algorithm: Algorithm, step: int) -> Iterator[Mode]:
    """Yield the modes of a step's groups without end; equal seeds and steps give equal modes in every run.

    Memory with probability p; given memory, off-policy with probability q (paper, section on the hybrid update).
    """
    generator = np.random.default_rng((algorithm.seed, step))

    def draw() -> Mode:
        memory, off_policy = generator.random(2) < (algorithm.memory_probability, algorithm.off_policy_probability)
        return Mode.of(memory=bool(memory), off_policy=bool(off_policy))

    if algorithm.mode_per == "step":
        yield from itertools.repeat(draw())
    while True:
        yield draw()


def draw_tags(algorithm: Algorithm, step: int, group_size: int) -> Iterator[tuple[Mode, str | None]]:
    """Yield mode and pair of a step's rollouts without end, group by group.

    The rollouts of a group share its mode. With ``baseline: paired`` every second rollout of a memory group, from the
    first one on, is one without memory instead; in a group of odd size they are one more.
    """
    for mode in draw_modes(algorithm, step):
        paired = mode.memory and algorithm.baseline == "paired"
        pair = uuid.uuid4().hex if paired else None
        for number in range(group_size):
            yield Mode.of(memory=False) if paired and number % 2 == 0 else mode, pair


def why_none_plays(progress: StepProgress, controller_log: Path | None) -> str:
    """Return that no agent has called the model, and why, as far as it is known; "" if one has, or a rollout has ended.

    Args:
        controller_log: of a controller on this machine.
    """
    if progress.calls or progress.ended:
        return ""
    log = controller_log.read_text(errors="replace") if controller_log and controller_log.exists() else ""
    idle = "it starts none" if progress.queued else "agents that were started are silent"
    of_controllers = {
        "silent": "none asks the gateway for them; start `empo2 controller --gateway URL`",
        "refused": "the gateway refuses its key; its EMPO2_KEY must be the gateway's",
        "ask": f"{idle}; see {controller_log or 'its log'}",
    }
    problem = progress.problem or first_error(log[-_LOG_CHARACTERS:]) or of_controllers[progress.controllers]
    return (
        f"no agent has called the model for {_NONE_PLAYS_SECONDS} s, {progress.queued} of {progress.rollouts} rollouts "
        f"wait for a controller: {problem}"
    )


class Empo2RolloutManager(AglRolloutManager, AglAsyncRolloutManager):
    """agent-lightning's managers, as one that tags rollouts and returns only those that can be trained on.

    Args:
        gateway: asked to complete the events of a rollout, and to finish its reflections.
        train_rollout_n: rollouts of a training task.
        step: the training step, from which the modes of the groups that are issued are drawn.
        max_prompt_tokens: most tokens of a training row's prompt.
        vocabulary: the model's number of tokens.
        version: number of updates that the weights of the model servers have had.
        pauses: whether rollouts may still run when those that were waited for have ended.
        controller_log: of a controller on this machine, by which the user is told why no rollout starts.
        hooks: the user's own, called before a request gets its tag.

    Attributes:
        carried_over: the training rollouts that still run, whole groups.
        results: what became of the rollouts that have ended.
        played: these rollouts as they ended, with those that are dropped.
        metrics: of the gateway, and where the time went.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        gateway: GatewayClient,
        train_rollout_n: int,
        step: int,
        max_prompt_tokens: float = math.inf,
        vocabulary: float = math.inf,
        version: int = 0,
        pauses: bool = False,
        controller_log: Path | None = None,
        hooks: RolloutHooks | None = None,
        **others: Any,
    ) -> None:
        algorithm = settings.algorithm
        self._has_user_hooks, self._user_hooks = hooks is not None, hooks or RolloutHooks()
        called = SimpleNamespace(
            on_enqueue=self._tagged, on_succeeded=self._user_hooks.on_succeeded, on_failed=self._user_hooks.on_failed
        )
        super().__init__(**others | {"step": step, "train_rollout_n": train_rollout_n, "hooks": called})
        self._validates_with_memory = settings.run.validate_with_memory and algorithm.name == "empo2"
        self._tags = draw_tags(algorithm, step, train_rollout_n)
        self._with_memory = itertools.cycle((False, settings.run.validate_with_memory))
        self._settings = settings
        self._gateway = gateway
        self._version = version
        self._pauses = pauses
        self._controller_log = controller_log
        self._tell_at = perf_counter() + _NONE_PLAYS_SECONDS
        self.carried_over: list[EnqueuedRollout] = []
        self._created: list[EnqueuedRollout] = []
        self.results = StepResults(
            max_prompt_tokens,
            algorithm.failed_rollout_return,
            main_chat_only=not settings.gateway.trained_calls,
            vocabulary=vocabulary,
        )
        self.played: list[CompletedRollout] = []
        self.metrics: dict[str, float] = {}
        self._settling = 0.0
        self._statuses: dict[str, RolloutLifecycleStatus] = {}  # of which nobody has asked since they were read

    def delete_model(self) -> dict[str, Any]:
        """Delete the registered model servers; calls that come until others are registered wait."""
        if self._pauses:
            self._gateway.pause()
        return super().delete_model()

    def register_model(self, server_addresses: list[str]) -> list[Model]:
        """Register the model servers with their version; calls that wait for them go on."""
        registered = [
            model.model_copy(update={"version": self._version}) for model in super().register_model(server_addresses)
        ]
        self.client.post_with_retry("/api/models", json=[model.model_dump(mode="json") for model in registered])
        self._gateway.resume()
        return registered

    def _get_rollout(self, rollout_id: str) -> Rollout:
        """Return a rollout; of one that has not ended its status alone, from one list for all that are asked about.

        agent-lightning's loops ask about each rollout, again and again.
        """
        if perf_counter() > self._tell_at:
            self._tell_at = math.inf
            if said := why_none_plays(self._gateway.progress(), self._controller_log):
                say_note(said)
        if rollout_id not in self._statuses:
            self._statuses = self._gateway.statuses()
        status = self._statuses.pop(rollout_id, None)
        if status is None or status.state in TERMINAL_STATES:
            return super()._get_rollout(rollout_id)
        return Rollout(rollout_id=rollout_id, input=None, config=RolloutConfig(), status=status)

    def _run_succeeded_hook(self, rollout: Rollout) -> None:
        if self._has_user_hooks:  # agent-lightning would read all events of a rollout for it
            with contextlib.suppress(httpx.HTTPStatusError, ValueError):  # `_build_completed_rollout` will tell
                super()._run_succeeded_hook(rollout)

    def _build_completed_rollout(self, enqueued_rollout: EnqueuedRollout, rollout: Rollout) -> CompletedRollout:
        """Return a rollout with its events and reward, or without them and dropped where they cannot be read."""
        if RolloutTag.read(rollout.metadata) is not None:
            # The gateway embeds some states after the reply was sent: wait until their events are recorded.
            begin = perf_counter()
            self._gateway.settle(enqueued_rollout.rollout_id)
            self._settling += perf_counter() - begin
        try:
            completed = super()._build_completed_rollout(enqueued_rollout, rollout)
            return completed.model_copy(update={"events": whole_events(completed.events)})
        except httpx.TransportError:  # the gateway is gone
            raise
        except Exception as error:  # whatever a call, an event or a reward holds
            unread = CompletedRollout(
                **enqueued_rollout.model_dump(),
                metadata=rollout.metadata.model_dump(),
                rollout_state=rollout.status.state,
                error_message=rollout.status.error_message,
            )
            self.results.drop_unreadable(unread, error)
            return unread

    def _fetch_rollout_events(self, rollout_id: str) -> tuple[list[Event], list[Event]]:
        """Return all events, and those that agent-lightning is to read: the rewards. `StepResults` reads the calls."""
        events = self._get_events(rollout_id, format=CONTINUED)
        return events, [event for event in events if event.event_type == "reward"]

    def _tagged(self, request: RolloutCreate) -> RolloutCreate:
        """Return a request for a task alone, with its tag; agent-lightning makes those of a step group by group.

        Of the validation rollouts every second one is played with memory, if any are.
        """
        algorithm, task = self._settings.algorithm, request.input[TASK]
        request = self._user_hooks.on_enqueue(request.model_copy(update={"input": {**task}}))
        if algorithm.name != "empo2":
            return request
        if request.is_train:
            mode, pair = next(self._tags)
        elif next(self._with_memory):
            mode, pair = Mode.of(memory=True), None
        else:
            return request
        tag = RolloutTag(
            **mode.model_dump(),
            scope=scope_of(task, self._settings.memory.scope),
            pair=pair,
            read_only=not request.is_train,
            teaches=mode.off_policy and algorithm.distills and algorithm.off_policy_loss != "imitation",
            step=self._step,
        )
        metadata = dict(request.metadata or {}) | {TAG: tag.model_dump(exclude_none=True)}
        return request.model_copy(update={"metadata": metadata})

    def _create_rollouts(self, data: dict[str, Any], *, is_train: bool) -> list[EnqueuedRollout]:
        if not is_train and self._validates_with_memory:  # all are played at the same time
            data = {key: [value for value in values for _ in range(2)] for key, values in data.items()}
        self._created = super()._create_rollouts(data, is_train=is_train)
        return self._created

    def play(
        self,
        tasks: Sequence[Mapping[str, Any]],
        *,
        is_train: bool,
        groups: int | None = None,
        carried_over: Sequence[EnqueuedRollout] = (),
    ) -> list[CompletedRollout]:
        """Play rollouts and return the usable ones (`StepResults.usable`), ready for agent-lightning's adapter.

        Args:
            tasks: the inputs of the rollouts; each has fields of its own.
            groups: wait until so many have ended, and leave the others in ``carried_over``; None for all.
            carried_over: rollouts of earlier steps, which go on.
        """
        begin, data = perf_counter(), {TASK: [*tasks]}
        with self._told_of_a_new_gateway(carried_over):
            if groups is None:
                self.played = self.enqueue_and_wait_until_completed(data, is_train=is_train)
            else:
                self.played, self.carried_over = self.enqueue_and_wait_until_group_completed(
                    data, [*carried_over], is_train=is_train, target_finished_group_num=groups
                )
            ended = perf_counter()
            if self._pauses:
                self.metrics["training/async/proxy_inflight_at_pause"] = self._gateway.pause()
                self.metrics["training/async/proxy_drain_seconds"] = perf_counter() - ended
            if is_train or not self._pauses:  # training rollouts go on during a validation: the next step counts it
                self.metrics |= self._gateway.drain(self._settings.reflection.timeout)
            if not self._pauses:  # vLLM sleeps now; a call of what an agent has left behind would end it as it wakes
                self._gateway.hold()
        self.metrics |= {
            "timing_s/rollouts": ended - begin,
            "timing_s/embedding": self._settling,
            "timing_s/drain": perf_counter() - ended,
        }
        usable = self.results.usable(self.played, is_train=is_train)
        self.metrics |= rollout_times(self.played, self.results.calls)
        return usable

    @contextlib.contextmanager
    def _told_of_a_new_gateway(self, carried_over: Sequence[EnqueuedRollout]) -> Iterator[None]:
        """Wait for a gateway that has ended and is started again; then raise `NoUsableRollouts`.

        agent-lightning keeps rollouts in RAM, so those that were played are gone; the trainer plays the step anew, with
        the same weights and the memory's file. Those that the gateway has nevertheless are deleted, or they would be
        played first, and leave tips.
        """
        try:
            yield
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code != HTTPStatus.NOT_FOUND:
                raise
            self.played, self.carried_over = [], []
            self._gateway.check({})
            for rollout in (*self._created, *carried_over):
                self._delete_rollout(rollout.rollout_id)
            raise NoUsableRollouts("the gateway has ended and was started again, without its rollouts") from error

    def drop_carried_over(self) -> None:
        """Delete the rollouts that still run, and let their agents' calls go on, which then fail."""
        for rollout in self.carried_over:
            self._delete_rollout(rollout.rollout_id)
        self.carried_over = []
        self._gateway.resume()
