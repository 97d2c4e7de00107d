"""The calls of a rollout: agent-lightning's events joined with the gateway's, and the turns that are trained."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, Self

from agentlightning.server.routes.events import _trim_model_request
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
from pydantic import BaseModel, FiniteFloat

from empo2.recipe.messages import Message, has_images, is_beside, is_compaction, newest_observation
from empo2.recipe.protocol import CALL_EVENT, IMPOSSIBLE, TOP_TOKENS, CallEvent, Mode


class _Chat(BaseModel):
    messages: list[Message] | None = None


class _Server(BaseModel):
    version: int | None = None


class _ModelRequest(BaseModel):
    """What is read of the data of a ``model_request`` event."""

    request: _Chat
    response: dict[str, Any]
    server: _Server = _Server()
    latency_ms: FiniteFloat | None = None
    http_status: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class PlayedCall:
    """A model call of a rollout."""

    number: int  # among the calls of the rollout that have a reply, from 0, in their order
    data: Mapping[str, Any]  # of agent-lightning's ``model_request`` event
    ended: float  # when it was answered, Unix time
    prompt: list[int]  # token ids as they were sent, tips included; empty if the call was refused
    reply: list[int]  # token ids; empty if the call was refused
    log_probs: list[float] | None  # of the reply, as vLLM sampled it; None if they are unknown, one of them is enough
    event: CallEvent | None  # the gateway's; None if the rollout has no tag
    intrinsic: float = 0.0  # 1/n of the visit that it made; in a turn, that of its request, however often it was sent

    @property
    def seconds(self) -> float:
        return (self.data.get("latency_ms") or 0.0) / 1000

    @property
    def begun(self) -> float:
        return self.ended - self.seconds

    @property
    def without_tokens(self) -> bool:
        """Return whether it was answered, but without token ids, so that it cannot be trained."""
        choices = self.data["response"].get("choices")
        return self.data.get("status") != "error" and bool(choices) and choices[0].get("token_ids") is None

    @property
    def observation(self) -> str:
        """Return the newest one as the agent wrote it; "" for a call without messages."""
        if self.event:
            return self.event.observation
        return newest_observation(self.data["request"].get("messages") or [])

    @property
    def has_images(self) -> bool:
        """Return True if a message holds anything but text: the tokens of an image are no text that can be trained."""
        return any(map(has_images, self.data["request"].get("messages") or []))

    @property
    def tops(self) -> list[dict[int, float]]:
        """Return of each token of the reply the likeliest tokens and their log-probs, as sampled; empty if unknown."""
        tokens, log_probs = (self.event.top_tokens, self.event.top_log_probs) if self.event else (None, None)
        if tokens is None or log_probs is None or len(tokens) != len(self.reply):
            return [{} for _ in self.reply]
        of_tokens = [dict(zip(*of_token, strict=False)) for of_token in zip(tokens, log_probs, strict=False)]
        return [dict(islice(tops.items(), TOP_TOKENS)) for tops in of_tokens]

    def as_trained(self, mode: Mode) -> Self | None:
        """Return the call under the prompt that π_θ reads, tip-free if off-policy; None if that one is not known.

        vLLM's log-probs, sampled *with* the tips, stay: π_old is tip-conditioned, π_θ is not.
        """
        if not mode.off_policy:
            return self
        tip_free = self.event.tip_free_prompt_token_ids if self.event else None
        return None if tip_free is None else replace(self, prompt=tip_free)

    def triplet(self) -> Triplet:
        """Return the call as agent-lightning's adapter takes it, which extends log-probs in place by later turns'."""
        return Triplet(
            prompt={"token_ids": self.prompt},
            response={"token_ids": self.reply, "log_probs": self.log_probs and [*self.log_probs]},
            metadata={"server": self.data.get("server", {})},
        )


def calls_of(events: Sequence[Mapping[str, Any]], vocabulary: float = math.inf) -> list[PlayedCall]:
    """Return the calls among a rollout's events; of equal prompts the first has the gateway's first event, and so on.

    Both sides record a call as it is answered, so their events of equal prompts have the same order.

    Args:
        vocabulary: the model's number of tokens.

    Raises:
        ValueError: an event has not the form in which it is recorded, or a token that the model does not have.
    """
    recorded: dict[tuple[int, ...], deque[CallEvent]] = defaultdict(deque)
    for event in events:
        if event["event_type"] == CALL_EVENT:
            call = CallEvent.model_validate(event["data"])
            _check_ids(call.tip_free_prompt_token_ids or [], vocabulary)
            recorded[tuple(call.prompt_token_ids)].append(call)
    calls: list[PlayedCall] = []
    number = 0
    for event in events:
        if event["event_type"] == "model_request":
            data = event["data"]
            _ModelRequest.model_validate(data)
            ids = _trim_model_request(data) if data.get("status") != "error" else {}
            prompt, reply = ids.get("prompt_token_ids") or [], ids.get("response_token_ids") or []
            _check_ids(prompt, vocabulary)
            _check_ids(reply, vocabulary)
            same = recorded[tuple(prompt)]
            joined = same.popleft() if same else None
            log_probs = ids.get("response_log_probs")
            if log_probs is not None and (len(log_probs) != len(reply) or min(log_probs, default=0) <= IMPOSSIBLE):
                log_probs = None
            novelty = joined.intrinsic_reward if joined and reply else 0.0
            calls.append(PlayedCall(number, data, event["timestamp"], prompt, reply, log_probs, joined, novelty))
            number += bool(reply)
    return calls


def _check_ids(ids: list[int], vocabulary: float) -> None:
    if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary):
        raise ValueError(f"it has a token that the model's vocabulary of {vocabulary} does not have")


def main_calls(calls: Sequence[PlayedCall]) -> list[PlayedCall]:
    """Return the calls without those beside the main chat; the gateway cannot tell any before the first with tools.

    Those that compact the chat stay: where they are not trained (``gateway.compaction``), the gateway records none.
    """
    asked = [call.data["request"] for call in calls]
    if not any(each.get("tools") for each in asked):
        return [*calls]
    beside = [is_beside(each) and not is_compaction(each, with_tools=True) for each in asked]
    return [call for call, out in zip(calls, beside, strict=True) if not out]


def turns_of(calls: Sequence[PlayedCall]) -> list[PlayedCall]:
    """Return the calls to train: all that have a reply, but only one of a request that was sent again.

    Equal prompts alone do not tell: an agent that sends only its newest turn sends the same prompt each time it comes
    back to a state, and acts on each reply, while a client that tries again uses one reply of two. (agent-lightning
    1.0.2 always trains the last call of equal prompts alone.) A call repeats the one before it with the same prompt if

    - it was sent before that one was answered, by a client that gave up waiting or asked for several replies at once:
      nobody acts on a reply that is not there yet;
    - or no call lies between them, and a later prompt goes on from theirs: such a chat shows which reply was used.

    Else the agent had the reply and sent the prompt again, so it is back in that state; or its action changed nothing.
    A retry after a reply that was lost on its way back cannot be told from that. It is trained as one more reply to its
    prompt, which it is: the policy sampled it.

    Of a request that was sent again, the replies that a later prompt holds are trained, or else the one sent last. It
    visited its state once, so its first turn has the largest 1/n of its calls, and no other turn has any.
    """
    answered = [call for call in calls if call.reply]
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, call in enumerate(answered):
        places[tuple(call.prompt)].append(place)
    turns: dict[int, PlayedCall] = {}
    for same in places.values():
        for request, used in _requests(answered, same):
            novelty = max(answered[place].intrinsic for place in request)
            for place in sorted(used):
                turns[place], novelty = replace(answered[place], intrinsic=novelty), 0.0
    return [turn for _, turn in sorted(turns.items())]


def _requests(answered: Sequence[PlayedCall], same: Sequence[int]) -> Iterator[tuple[list[int], set[int]]]:
    """Yield each request among the calls with one prompt: the places of its calls, and of those that are trained."""

    def held(place: int, begin: list[int]) -> bool:
        return any(len(later.prompt) > len(begin) and _begins(later.prompt, begin) for later in answered[place + 1 :])

    grows = held(same[0], answered[same[0]].prompt)
    requests = [[same[0]]]
    for before, place in pairwise(same):
        unread = answered[place].begun < answered[before].ended
        if unread or (grows and place == before + 1):
            requests[-1].append(place)
        else:
            requests.append([place])
    for request in requests:
        if len(request) == 1:
            yield request, {*request}
            continue
        replies = {tuple(answered[place].reply): place for place in request}
        used = {place for reply, place in replies.items() if held(place, [*answered[place].prompt, *reply])}
        yield request, used or {max(request, key=lambda place: answered[place].begun)}


def rows_of(turns: Iterable[PlayedCall]) -> list[list[PlayedCall]]:
    """Return the turns of each row, in the order of their first turns: a row for each chat of the rollout.

    A turn goes on with the longest row all of whose tokens its prompt begins with, so chats that take turns (a main
    agent and its sub-agents) stay whole. agent-lightning's adapter, which merges neighbors, gets the turns row by row.

    Args:
        turns: as they are trained.
    """
    rows: list[list[PlayedCall]] = []
    contexts: list[list[int]] = []  # of each row, its tokens so far
    for turn in turns:
        open_ = [place for place, context in enumerate(contexts) if _begins(turn.prompt, context)]
        place = max(open_, key=lambda each: len(contexts[each]), default=len(rows))
        if place == len(rows):
            rows.append([])
            contexts.append([])
        rows[place].append(turn)
        contexts[place] = turn.prompt + turn.reply
    return rows


def _begins(ids: list[int], begin: list[int]) -> bool:
    return ids[: len(begin)] == begin


def rollout_times(rollouts: Iterable[CompletedRollout], calls: Mapping[str, Sequence[PlayedCall]]) -> dict[str, float]:
    """Return the mean seconds of a rollout's parts, over the rollouts that called the model, as metrics.

    ``queue``: until its agent was started, ``start``: until its first call, ``model``: all of its calls, as the gateway
    saw them, ``agent``: the rest, until its end was noticed, also while its calls waited for an update. Parallel calls
    of one agent each count in full.

    Args:
        calls: by rollout id.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        of_rollout = calls[rollout.rollout_id]
        if not of_rollout or rollout.running_at is None or rollout.finished_at is None:
            continue
        first, model = min(call.begun for call in of_rollout), sum(call.seconds for call in of_rollout)
        running = min(rollout.running_at, first)  # a short episode is seen running at its end
        parts["queue"].append(running - rollout.enqueue_time)
        parts["start"].append(first - running)
        parts["model"].append(model)
        parts["agent"].append(rollout.finished_at - first - model)
    return {f"timing_s/rollout_{name}": sum(seconds) / len(seconds) for name, seconds in parts.items()}
