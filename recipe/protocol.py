"""The contract between gateway and trainer: the rollout's tag, the call's event, the routes, the score.

Both sides import this module, and neither imports the other.
"""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import AfterValidator, BaseModel, ConfigDict, FiniteFloat, ValidationError

from .config import ALL_TASKS, Algorithm
from .errors import ConfigError
from .printed import one_line

TAG = "empo2"  # key of the tag in a rollout's metadata
TOP_TOKENS = 20  # of a sampled token's alternatives are recorded: vLLM's ``--max-logprobs``
IMPOSSIBLE = -9999.0  # vLLM's log-prob of a token that a grammar excludes, in the place of -inf
PANEL = "panel"  # field of a validation task: the name of the set that it is reported with
MADE_UP = "made_up"  # field of the tasks that `empo2 init` makes up, which are not for training
TRAIN_PANEL, UNSEEN_PANEL = "train", "unseen"  # the training tasks, and those that the policy is not trained on
MODEL_EVENT, REWARD_EVENT = "model_request", "reward"  # types of agent-lightning's events
CALL_EVENT = "empo2_call"  # type of the event beside each of agent-lightning's ``model_request`` events
CONTINUED = "continued"  # ``format`` of a rollout's events as the gateway holds them, for `whole_events`
ERROR_EVENT = "empo2_agent_error"  # type of the event of an agent that ended with an exception

# vLLM's ``--middleware``: its server answers who has `model_key`. With the second one, chat completions also take
# ``prompt_token_ids`` (``gateway.cumulative_tokens``).
KEY_CHECK = "empo2.recipe.engine.model_key.KeyCheck"
PROMPT_IDS = "empo2.recipe.engine.prompt_ids.PromptTokenIds"
MODEL_KEY = "EMPO2_MODEL_KEY"  # variable of a vLLM server
KEY, ADMIN_KEY = "EMPO2_KEY", "EMPO2_ADMIN_KEY"  # variables with the gateway's keys

ROUTES = "/empo2"
STATUSES = f"{ROUTES}/statuses"  # of all rollouts, by their ids
STATE, DRAIN, SNAPSHOT, RESTORE = f"{ROUTES}/state", f"{ROUTES}/drain", f"{ROUTES}/snapshot", f"{ROUTES}/restore"
PAUSE, RESUME, UPDATED = f"{ROUTES}/pause", f"{ROUTES}/resume", f"{ROUTES}/updated"
SETTLE = f"{ROUTES}/settle"  # as `settle_route`, of all rollouts
SETTLE_SECONDS = 30.0  # after which it answers all the same


@dataclass(frozen=True)
class Keys:
    """The gateway's keys; both empty where it asks for none."""

    # Presented by the controller, for the list and the states of rollouts; and by agents that have no key of their own,
    # for model calls and events.
    agent: str = ""
    admin: str = ""  # presented by the trainer and the operator; opens every route

    def of_rollout(self, rollout_id: str) -> str:
        """Return the key of one rollout's agent: HMAC-SHA256 of its id under ``agent``; "" if there is no ``agent``."""
        return self.agent and hmac.new(self.agent.encode(), rollout_id.encode(), hashlib.sha256).hexdigest()


def given_keys() -> Keys:
    """Return the gateway's keys that the environment gives, "" where it gives none; a ConfigError if they are equal."""
    keys = Keys(os.environ.get(KEY, ""), os.environ.get(ADMIN_KEY, ""))
    if keys.agent and keys.agent == keys.admin:
        raise ConfigError(f"{ADMIN_KEY} equals {KEY}, which agents get: give another one")
    return keys


def model_key(admin: str) -> str:
    """Return the key of the model servers, which gateway and trainer make from the admin key; empty if that is."""
    return hmac.new(admin.encode(), b"model servers", "sha256").hexdigest() if admin else ""


def settle_route(rollout_id: str) -> str:
    """Return the route that answers once all calls of a rollout have their events, see `Unsettled`."""
    return f"{ROUTES}/rollouts/{rollout_id}/settle"


def trace_of(rollout_id: str) -> tuple[int, int]:
    """Return the ids of a rollout's trace and of its own span in it (W3C Trace Context).

    agent-lightning's ids are random UUIDs, and then the trace has the rollout's id.
    """
    digest = hashlib.blake2b(rollout_id.encode(), digest_size=24).digest()
    is_uuid = re.fullmatch("(?!0{32})[0-9a-f]{32}", rollout_id)
    return int(rollout_id, 16) if is_uuid else int.from_bytes(digest[:16]), int.from_bytes(digest[16:])


def traceparent(rollout_id: str) -> str:
    """Return the W3C ``traceparent`` that makes spans children of a rollout's own span."""
    trace, span = trace_of(rollout_id)
    return f"00-{trace:032x}-{span:016x}-01"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Mode(_Message):
    """The mode of a rollout: with or without memory, updated on-policy or off-policy."""

    rollout_mode: Literal["memory", "no-memory"] = "no-memory"  # ``memory`` if the gateway shows tips
    # ``off-policy`` if the update removes the tips from the prompts.
    update_mode: Literal["on-policy", "off-policy"] = "on-policy"

    @classmethod
    def of(cls, *, memory: bool, off_policy: bool = False) -> Self:
        """Build a mode from its two draws; without memory every update is on-policy."""
        return cls(
            rollout_mode="memory" if memory else "no-memory",
            update_mode="off-policy" if memory and off_policy else "on-policy",
        )

    @property
    def memory(self) -> bool:
        return self.rollout_mode == "memory"

    @property
    def off_policy(self) -> bool:
        return self.update_mode == "off-policy"

    @property
    def name(self) -> str:
        """Return it as a person reads it: ``no memory``, ``memory, on-policy`` or ``memory, off-policy``."""
        return f"memory, {self.update_mode}" if self.memory else "no memory"


class RolloutTag(Mode):
    """The content of a rollout's ``metadata.empo2``, written by the trainer."""

    scope: str  # its memory scope
    # Name of its paired group, some of whose rollouts see tips and some do not; None in every other group.
    pair: str | None = None
    read_only: bool = False  # True in validation: the rollout sees tips and leaves nothing in the memory
    teaches: bool = False  # True if the likeliest tokens are recorded beside each sampled one, for `CallEvent`
    step: int | None = None  # the training step that it was issued in; None outside of training

    @property
    def mode(self) -> Mode:
        return Mode(rollout_mode=self.rollout_mode, update_mode=self.update_mode)

    @classmethod
    def read(cls, metadata: Any) -> Self | None:
        """Return the tag in a rollout's metadata (a mapping or an object); None if there is no valid tag."""
        tag = metadata.get(TAG) if isinstance(metadata, Mapping) else getattr(metadata, TAG, None)
        try:
            return None if tag is None else cls.model_validate(tag)
        except ValidationError:
            return None


class Serving(_Message):
    """How the gateway answers agents that have no rollout: told by ``empo2 serve`` when it starts the gateway."""

    name: str  # of the model, as agents see it
    tag: RolloutTag | None = None  # of their calls, read-only; None if they are shown no tips


class Continued(TypedDict):
    """A list that begins as that of an earlier call of its attempt does."""

    call: int  # number of that call among the attempt's events of type `MODEL_EVENT`, from 0
    first: int  # how many elements of its messages, or of its prompt and reply, come first
    more: list[Any]  # the elements after them


class CallEvent(_Message):
    """One model call of a tagged rollout, recorded by the gateway, as `whole_events` returns it.

    The gateway keeps ``call``, the number of its call, in the place of the prompt; and the tip-free prompt only where
    it is another one, as a `Continued`, or None if it is not known.
    """

    prompt_token_ids: list[int]  # the prompt as it was sent, tips included
    # The prompt as the agent wrote it; equal to ``prompt_token_ids`` if no tips were shown, None if the model server
    # did not return it.
    tip_free_prompt_token_ids: list[int] | None = None
    tip_ids: list[int] = []  # tips that were put into this call's newest turn
    scope: str = ""  # memory scope of the rollout
    observation: str = ""  # the newest one, as the agent wrote it; "" for a call without messages
    # Visits to similar states: those before the step, the rollout's own so far, and this one; None if the memory
    # failed. A request that is sent again before its answer came makes no other visit.
    visits: int | None = None
    # The visit's novelty, 1 / visits; 0 if the memory failed, or if an equal call's visit counts.
    intrinsic_reward: FiniteFloat = 0.0
    # Of each token of the reply the at most `TOP_TOKENS` likeliest ones, the sampled one among them, as ids, and their
    # log-probs as vLLM sampled; None unless the tag asks for them.
    top_tokens: list[list[int]] | None = None
    top_log_probs: list[list[float]] | None = None


_Line = Annotated[str, AfterValidator(one_line)]


class AgentError(_Message):
    """Data of an ``empo2_agent_error`` event: the exception that ended an agent."""

    type: _Line  # its class, without the module
    message: _Line = ""  # its text
    where: _Line = ""  # the last frame in the user's own files, ``quiz_agent.py:12 in run``; "" if it is not known
    output: str = ""  # the end of its traceback, or of what the agent's command wrote to stderr

    @property
    def cause(self) -> str:
        """Return what equal failures share: their messages may hold numbers that differ."""
        return f"{self.type} at {self.where}" if self.where else f"{self.type}: {self.message}"

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" + (f" ({self.where})" if self.where else "")


type Controllers = Literal["silent", "refused", "ask"]


class StepProgress(_Message):
    """How far the rollouts of a step, or of a validation, have come."""

    rollouts: int = 0  # that there are; 0 while the trainer plays none
    ended: int = 0  # how many of them have ended
    queued: int = 0  # how many of them no controller has started
    controllers: Controllers = "silent"  # whether one asks for rollouts, or was refused, since its key is wrong
    problem: str = ""  # what a controller says of a rollout that has not ended; "" for nothing
    validation: bool = False  # True if those that have not ended are validation rollouts
    calls: int = 0  # to the model
    tips: int = 0  # that were written


class GatewayState(_Message):
    """Response of ``GET /empo2/state``: the facts that the trainer compares before a run, and sizes for monitoring."""

    model: str  # name under which the gateway serves the policy
    memory_size: int  # tips stored
    episodes: int  # tagged rollouts that the trainer has not read yet
    reflections: int  # reflections under way
    temperature: float | None = None  # forced on training rollouts; None if the gateway does not report it
    val_temperature: float | None = None  # forced on validation rollouts
    success_return: float | None = None  # by which a reflection is told of success, and the values of tips learn
    failure_return: float | None = None  # the other end of the returns' range
    episode_tokens: int | None = None  # most tokens of tips in one prompt
    progress: StepProgress = StepProgress()  # of the current step


class TimeLimit(_Message):
    """Body of ``POST /empo2/drain`` and ``POST /empo2/pause``."""

    # Seconds that what is under way may take: reflections and events of a drain, whose answer comes at most 10 seconds
    # later; calls and reflections of a pause, behind which new ones wait for ``POST /empo2/resume``.
    timeout: float


class Unsettled(_Message):
    """Response of ``POST /empo2/settle``: the answered calls whose states are still to be embedded and counted."""

    late: int = 0  # of the rollouts that were asked about
    of_all: int = 0  # of all rollouts; does not change while the memory stands still


class PauseState(_Message):
    """Response of ``POST /empo2/pause``."""

    at_pause: int  # calls and reflections that were under way when it came
    under_way: int  # those of them that still are


class UpdateResult(Mode):
    """What an update made of one rollout, whose mode it has; told for its trace."""

    rollout_id: str
    return_: float | None = None  # as in training; None if the rollout has none
    advantage: float | None = None  # mean over its trained tokens; None if it was not trained on
    masked_tokens: int | None = None  # of them; None where the update left it out, since its group has no gradient
    dropped: str | None = None  # why it was not trained on; None if it was


class UpdatedRequest(_Message):
    """Body of ``POST /empo2/updated``: the rollouts of a step, after its update."""

    step: int
    results: list[UpdateResult]


class FileRequest(_Message):
    """Body of ``POST /empo2/snapshot`` and ``POST /empo2/restore``."""

    path: str  # of a memory file (``*.sqlite``) below the gateway's folder; relative to it, or absolute


def data_of(events: Iterable[Mapping[str, Any]], event_type: str) -> list[dict[str, Any]]:
    """Return the data of a rollout's events of one type, in their order; of rewards the last one counts."""
    return [event["data"] for event in events if event["event_type"] == event_type]


def whole_events(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of an attempt with all messages and prompts, from those that hold what is new in each call.

    Equal messages, and the token ids of equal prefixes, are the same objects.

    Args:
        events: all of the attempt, or all of its calls.
    """
    messages: list[Sequence[Any]] = []  # of each call
    sent: list[tuple[list[int], list[int]]] = []  # its prompt and reply
    tip_free: dict[int, tuple[list[int], list[int]]] = {}  # likewise
    found = []
    for event in events:
        data = event["data"]
        if event["event_type"] == MODEL_EVENT:
            request, response = data.get("request"), data.get("response")
            prompt, reply = prompt_and_reply(response)
            if isinstance(prompt, dict):
                ids = prompt
                prompt = _joined(prompt, [*chain(*sent[prompt["call"]])])
                chat = _joined(request["messages"], messages[request["messages"]["call"]])
                given = {"prompt_token_ids": prompt} if request.get("prompt_token_ids") == ids else {}
                request, response = {**request, "messages": chat, **given}, {**response, "prompt_token_ids": prompt}
                data = {**data, "request": request, "response": response}
            messages.append((request.get("messages") if isinstance(request, dict) else None) or ())
            sent.append((prompt, reply))
        elif event["event_type"] == CALL_EVENT and "call" in data:
            number = data["call"]
            others = {name: value for name, value in data.items() if name not in ("call", "tip_free_prompt_token_ids")}
            prompt, reply = sent[number]
            free = data.get("tip_free_prompt_token_ids", prompt)
            if isinstance(free, dict):
                free = _joined(free, [*chain(*tip_free[free["call"]])])
            if free is not None:
                tip_free[number] = free, reply
            data = {"prompt_token_ids": prompt, "tip_free_prompt_token_ids": free, **others}
            data = {name: value for name, value in data.items() if value is not None}
        found.append({**event, "data": data})
    return found


def _joined(new: Mapping[str, Any], before: Sequence[Any]) -> list[Any]:
    return [*before[: new["first"]], *new["more"]]


def prompt_and_reply(response: Any) -> tuple[Any, list[int]]:
    """Return the token ids in a model server's answer; none where it has none."""
    response = response if isinstance(response, dict) else {}
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return response.get("prompt_token_ids") or choice.get("prompt_token_ids") or [], choice.get("token_ids") or []


def scope_of(task: Mapping[str, Any], scope: str | Sequence[str]) -> str:
    """Return the memory scope of a task as unambiguous text.

    Args:
        scope: ``memory.scope``: fields of the task, or ``all-tasks`` for none.

    Raises:
        ConfigError: the task lacks a field.
    """
    fields = () if scope == ALL_TASKS else scope
    missing = [name for name in fields if name not in task]
    if missing:
        raise ConfigError(f"memory.scope={list(fields)}: tasks have no field {missing[0]!r}; they have {sorted(task)}")
    return json.dumps({name: task[name] for name in fields}, default=str)


def is_success(return_: float, success_return: float) -> bool:
    """Return whether a return reaches ``success_return``, but for what sums of rewards are rounded by: 1e-6 of it.

    Below 1 in magnitude, ``success_return`` counts as 1.
    """
    return return_ >= success_return - 1e-6 * max(1.0, abs(success_return))


def place_in_range(return_: float, worst: float, best: float) -> float:
    """Return -1 for the worst return, 1 for the best one; the values of tips learn from it outside of paired groups."""
    return 2 * (return_ - worst) / (best - worst) - 1


def scaled_return(algorithm: Algorithm, return_: float, intrinsic: float = 0.0) -> float:
    """Return the score of a rollout, used for its advantage and for the credit of its tips.

    Args:
        return_: the environment's return, in its own units.
        intrinsic: sum over the rollout's calls of 1/n.
    """
    return algorithm.scale * (return_ + algorithm.new_state_reward * intrinsic)
