"""Predict, from the messages alone, which calls of an episode share a training row.

A call joins a row if its prompt's tokens begin with those of the row so far (`trainer.rollout_calls.rows_of`). A chat
template that drops parts of earlier messages, such as reasoning, can split a row that is predicted to be one.
"""

import json
from collections.abc import Sequence

from empo2.recipe.gateway.normal_form import normal, normal_message
from empo2.recipe.gateway.tokens.sampled_messages import SampledMessages
from empo2.recipe.messages import arguments_of, text_of
from empo2.recipe.retrofit.recorder import Call
from empo2.recipe.retrofit.scripted_model import Body


def turns_among(calls: Sequence[Call]) -> list[Call]:
    """Return the calls without those whose request was sent again, as `trainer.rollout_calls.turns_of` tells them.

    Sent again is what came before the answer, or at once, where the chat later goes on from this prompt.
    """
    turns = []
    for number, call in enumerate(calls):
        later = calls[number + 1 :]
        again = next((other for other in later if prompt_of(other) == prompt_of(call)), None)
        unused = again is not None and again is later[0] and any(_goes_on(other, call) for other in later)
        if again is None or not (again.parallel or unused):
            turns.append(call)
    return turns


def _goes_on(later: Call, call: Call) -> bool:
    if "messages" not in call.body:
        old, new = str(call.body.get("prompt")), str(later.body.get("prompt"))
        return len(new) > len(old) and new.startswith(old)
    old, new = call.body["messages"], later.body.get("messages") or []
    return len(new) > len(old) and new[: len(old)] == old


def reasons_for_rows(calls: Sequence[Call]) -> list[str]:
    """Return why each call that opens a training row, but the first, does so, in their order.

    A call goes on with any earlier chat of the episode whose messages and reply it begins with.
    """
    reasons: list[str] = []
    sampled, rows = SampledMessages(), list[_Row]()
    for call in calls:
        body = sampled.restored(normal(call.body))
        row = max((row for row in rows if row.goes_on(call, body)), key=lambda row: len(row.expected), default=None)
        if row is None:
            if rows:
                reasons.append(_reason(rows, call, body))
            rows.append(row := _Row())
        row.extend(call, body)
        if "messages" in body:
            sampled.add(call.answer["choices"][0]["message"])
    return reasons


class _Row:
    """A training row: the call that it ends with, and what the next one must begin with."""

    call: Call
    body: Body
    expected: str | list[Body] = ""

    def extend(self, call: Call, body: Body) -> None:
        self.call, self.body, choice = call, body, call.answer["choices"][0]
        if "messages" in body:
            self.expected = [*map(_plain, body["messages"]), _plain(normal_message(choice["message"]))]
        else:
            self.expected = f"{body.get('prompt')}{choice['text']}"

    def goes_on(self, call: Call, body: Body) -> bool:
        if call.path != self.call.path or body.get("tools") != self.body.get("tools"):
            return False
        if isinstance(self.expected, str):
            return str(body.get("prompt")).startswith(self.expected)
        return [*map(_plain, body["messages"])][: len(self.expected)] == self.expected


def _reason(rows: Sequence[_Row], call: Call, body: Body) -> str:
    """Return why a call goes on with none of the rows, by the one that is most like it."""
    if call.parallel:
        return "calls are made in parallel: they do not follow from each other, and each is a training row"
    alike = [row for row in reversed(rows) if row.call.path == call.path]
    if not alike:
        return f"the agent goes from {rows[-1].call.path} to {call.path}: prompts of the two do not merge"
    if "messages" not in body:
        return "a prompt does not begin with the prompt and the reply before it"
    new = [*map(_plain, body["messages"])]
    row = max(alike, key=lambda row: _shared(row.expected, new))
    assert isinstance(row.expected, list)
    begins = all(message["role"] != "assistant" for message in new)
    if begins and new[0]["role"] == "system" and not _shared(row.expected, new):
        return "another chat begins: a sub-agent, or a call beside the main chat, has a row of its own"
    if body.get("tools") != row.body.get("tools"):
        return "the tools that are offered change from call to call; they stand at the prompt's beginning"
    return _difference(row.expected[: len(row.body["messages"])], row.expected, new)


def _shared(expected: str | list[Body], new: list[Body]) -> int:
    """Return how many messages two chats begin with alike."""
    return next((place for place, (a, b) in enumerate(zip(expected, new, strict=False)) if a != b), len(new))


def _difference(old: list[Body], expected: list[Body], new: list[Body]) -> str:
    if all(message["role"] != "assistant" for message in new):
        return "only the last turn is sent, or another chat is begun: append replies and answers to the chat, send all"
    where = next((i for i, (a, b) in enumerate(zip(expected, new, strict=False)) if a != b), len(new))
    if where == len(new):
        return "the chat goes back to an earlier turn: each branch is a training row"
    was, now = _short(expected[where]), _short(new[where])
    if where == len(old):
        if new[where]["role"] != "assistant":
            return "the model's reply is left out of the chat: append it as the assistant's message"
        return f"the model's reply is rewritten in the chat: it said {was}, the chat holds {now}; put back what it said"
    message, role = f"message {where + 1}", expected[where]["role"]
    if new[where] in expected[where + 1 :]:
        return f"the history is truncated: {message} ({role}: {was}) is gone; keep all, or end too long an episode"
    if new[where]["role"] == role == "system":
        return f"the system message is rewritten: it was {was}, then {now}; put what changes into the newest message"
    return f"the history is rewritten: {message} ({role}) was {was}, then {now}; leave earlier messages as they are"


def prompt_of(call: Call) -> str:
    """Return a text that two calls share if and only if they have the same prompt."""
    return json.dumps([call.body.get(key) for key in ("messages", "prompt", "tools")], sort_keys=True)


def _plain(message: Body) -> Body:
    """Return the parts of a message that a chat template reads, in one form for all clients."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], arguments_of(function)) for function in functions]
    return {"role": message.get("role"), "content": text_of(message.get("content")), "tool_calls": calls}


def _short(message: Body) -> str:
    return repr((message["content"] or str(message["tool_calls"]))[:60])
