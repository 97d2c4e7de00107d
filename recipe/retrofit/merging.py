"""Predict, from the messages alone, which calls are merged into one training row (`trainer.rollout_calls.rows_of`).

A call joins a row if its prompt begins with the tokens of the row so far. A chat template that drops parts of earlier
messages, such as reasoning, can split a row that is predicted to be one.
"""

import json
from collections.abc import Sequence
from itertools import pairwise

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


def reasons_for_new_rows(calls: Sequence[Call]) -> list[str]:
    """Return of each row but the first why its first call does not go on with the call before it."""
    rows, reasons = [calls[0]], []  # the last call of each row
    for before, call in pairwise(calls):
        joined = next((row for row in reversed(range(len(rows))) if _reason_for_new_row(rows[row], call) is None), None)
        if joined is not None:
            rows[joined] = call
        else:
            rows.append(call)
            reasons.append(_reason_for_new_row(before, call) or "")
    return reasons


def _reason_for_new_row(before: Call, call: Call) -> str | None:
    """Return why the call does not join the row that another call ends; None if it does."""
    if call.parallel:
        return "calls are made in parallel: they do not follow from each other, and each is a training row"
    if call.path != before.path:
        return f"the agent goes from {before.path} to {call.path}: prompts of the two do not merge"
    if "messages" not in call.body:
        expected_prompt = str(before.body.get("prompt")) + before.answer["choices"][0]["text"]
        if str(call.body.get("prompt")).startswith(expected_prompt):
            return None
        return "a prompt does not begin with the prompt and the reply before it"
    if call.body.get("tools") != before.body.get("tools"):
        return "the tools that are offered change from call to call; they stand at the prompt's beginning"
    old, new = _chat(before), _chat(call)
    expected = [*old, _plain(before.answer["choices"][0]["message"])]
    if new[: len(expected)] == expected:
        return None
    return _difference(old, expected, new)


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


def _chat(call: Call) -> list[Body]:
    return [_plain(message) for message in call.body["messages"]]


def _plain(message: Body) -> Body:
    """Return the parts of a message that a chat template reads, in one form for all clients."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], arguments_of(function)) for function in functions]
    return {"role": message.get("role"), "content": text_of(message.get("content")), "tool_calls": calls}


def _short(message: Body) -> str:
    return repr((message["content"] or str(message["tool_calls"]))[:60])
