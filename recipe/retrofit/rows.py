"""Tell what training makes of each call of an episode, by the trainer's own rules, and why one opens a row.

No model is loaded: one number stands for the tools that a prompt offers, and one for each of its messages. A chat
template that drops parts of earlier messages, such as thoughts, can split a row that is one here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from empo2.recipe.config import Gateway
from empo2.recipe.gateway.normal_form import normal, normal_message
from empo2.recipe.gateway.tokens.replies import SampledMessages
from empo2.recipe.messages import Message, arguments_of, is_compaction, shared, text_of
from empo2.recipe.retrofit.recorder import Call
from empo2.recipe.trainer.rollout_calls import PlayedCall, main_calls, rows_of, turns_of

AGAIN = "repeats a request whose reply was not there yet, or was not used: only one reply is trained"
_BESIDE = "not trained: it stands beside the main chat, in one turn and without tools"
_COMPACTION = "not trained: it has the chat summarized, and gateway.compaction=untrained"
_OTHERS = "not trained: by gateway.trained_calls, or for embeddings"
_IMAGES = "has images, which are not trained"


@dataclass(frozen=True)
class Told:
    """What training makes of a call."""

    row: int | None = None  # its training row, from 1; None if it is not trained
    beside: bool = False  # True if it stands beside the main chat
    why: str = ""  # it is not trained, or opens another row than the first; "" otherwise


def tell(calls: Sequence[Call], settings: Gateway) -> list[Told]:
    """Return what training makes of each call."""
    told = [Told(why=f"answered {call.status}" if call.trained else _OTHERS) for call in calls]
    chats, played, with_tools = _Chats(), list[PlayedCall](), False
    for place in sorted(range(len(calls)), key=lambda place: calls[place].ended):
        if (call := calls[place]).status != 200 or not call.trained:
            continue
        with_tools = with_tools or bool(call.body.get("tools"))
        leaves_out = settings.compaction == "untrained" and not settings.trained_calls
        if leaves_out and is_compaction(call.body, with_tools=with_tools):
            told[place] = Told(beside=True, why=_COMPACTION)
        else:
            played.append(chats.played(place, call))
    main = played if settings.trained_calls else main_calls(played)
    turns = turns_of(main)
    texts = [turn for turn in turns if not turn.has_images]
    for some, what in ((played, Told(beside=True, why=_BESIDE)), (main, Told(why=AGAIN)), (turns, Told(why=_IMAGES))):
        for each in some:
            told[each.number] = what
    rows = rows_of(texts)
    answered = {turn.number: place for place, turn in enumerate(texts)}
    for number, row in enumerate(rows, 1):
        first, *others = row
        before = [
            [turn for turn in row if answered[turn.number] < answered[first.number]] for row in rows[: number - 1]
        ]
        grown = any(len(row) > 1 for row in rows)
        told[first.number] = Told(number, why=chats.reason(first, before, grown=grown) if before else "")
        for turn in others:
            told[turn.number] = Told(number)
    return told


class _Chats:
    """The calls of an episode with numbers in the place of tokens, and what these stand for."""

    def __init__(self) -> None:
        self._parts: list[Any] = []  # tools, and messages as `_plain` has them
        self._numbers: dict[str, int] = {}
        self._sampled = SampledMessages()

    def played(self, place: int, call: Call) -> PlayedCall:
        """Return a call as the trainer reads it, its chat as the gateway sends it."""
        body, choice = self._sampled.restored(normal(call.body)), call.answer["choices"][0]
        if "messages" in body:
            self._sampled.add(choice["message"])
            prompt = [*map(self._number, [body.get("tools") or [], *map(_plain, body["messages"])])]
            reply = [self._number(_plain(normal_message(choice["message"])))]
        else:  # a number below 0 for a character
            prompt, reply = ([~ord(character) for character in str(text)] for text in (body["prompt"], choice["text"]))
        data = {"request": body, "path": call.path, "latency_ms": 1000 * (call.ended - call.begun)}
        return PlayedCall(place, data, call.ended, prompt, reply, None, None)

    def _number(self, part: Any) -> int:
        number = self._numbers.setdefault(json.dumps(part, sort_keys=True), len(self._parts))
        if number == len(self._parts):
            self._parts.append(part)
        return number

    def reason(self, turn: PlayedCall, rows: Sequence[Sequence[PlayedCall]], *, grown: bool) -> str:
        """Return why a turn goes on with none of the rows before it, by the one that is most like it.

        Args:
            grown: True if a row of the episode has several turns.
        """
        alike = [row for row in reversed(rows) if row[-1].data["path"] == turn.data["path"]]
        if not alike:
            paths = f"from {rows[-1][-1].data['path']} to {turn.data['path']}"
            return f"the agent goes {paths}: prompts of the two do not merge"
        if turn.prompt in [each.prompt for row in alike for each in row]:
            return "an earlier prompt is repeated word for word: each reply is trained"
        if "messages" not in turn.data["request"]:
            return "a prompt does not begin with the prompt and the reply before it"
        tools, *new = turn.prompt

        def likeness(row: Sequence[PlayedCall]) -> tuple[int, int]:
            return sum(each.reply[0] in new for each in row), shared(row[-1].prompt[1:] + row[-1].reply, new)

        row = max(alike, key=likeness)
        old_tools, *expected = row[-1].prompt + row[-1].reply
        replies, same = likeness(row)
        said = any(self._parts[number]["role"] == "assistant" for number in new)
        if not replies and same < min(len(new), len(expected) - 1):
            if not same and (said or self._parts[new[0]]["role"] == "system"):
                return "another chat begins: a sub-agent, or a call beside the main chat, has a row of its own"
            if turn.begun < row[-1].ended:
                return _PARALLEL
            if grown or said:
                own = _short(self._parts[new[same]])
                return f"another chat begins, or this one is begun anew: message {same + 1} is {own}"
            return (
                "only the last turn is sent, or another chat is begun: append replies and answers to the chat, send all"
            )
        if tools != old_tools and same == len(expected):
            return f"the tools that are offered change, and a prompt begins with them: {self._change(old_tools, tools)}"
        if turn.begun < row[-1].ended:
            return _PARALLEL
        return _difference(len(row[-1].prompt) - 1, *([self._parts[each] for each in chat] for chat in (expected, new)))

    def _change(self, old: int, new: int) -> str:
        was, now = ({tool["function"]["name"] for tool in self._parts[number]} for number in (old, new))
        parts = ((was - now, "gone"), (now - was, "new"))
        return "; ".join(f"{', '.join(sorted(names))} {word}" for names, word in parts if names) or "their descriptions"


_PARALLEL = "calls are made in parallel: they do not follow from each other, and each is a training row"


def _difference(replied: int, expected: list[Message], new: list[Message]) -> str:
    """Return how a chat differs from what it should begin with, in which the last reply is at the place `replied`."""
    where = next((i for i, (a, b) in enumerate(zip(expected, new, strict=False)) if a != b), len(new))
    if where == len(new):
        return "the chat goes back to an earlier turn: each branch is a training row"
    was, now = _short(expected[where]), _short(new[where])
    if where == replied:
        if new[where]["role"] != "assistant":
            return "the model's reply is left out of the chat: append it as the assistant's message"
        return f"the model's reply is rewritten in the chat: it said {was}, the chat holds {now}; put back what it said"
    message, role = f"message {where + 1}", expected[where]["role"]
    if new[where] in expected[where + 1 :]:
        return f"the history is truncated: {message} ({role}: {was}) is gone; keep all, or end too long an episode"
    if new[where]["role"] == role == "system":
        return f"the system message is rewritten: it was {was}, then {now}; put what changes into the newest message"
    return f"the history is rewritten: {message} ({role}) was {was}, then {now}; leave earlier messages as they are"


def _plain(message: Message) -> Message:
    """Return the parts of a message that a chat template reads, in one form for all clients."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], arguments_of(function)) for function in functions]
    return {"role": message.get("role"), "content": text_of(message.get("content")), "tool_calls": calls}


def _short(message: Message) -> str:
    return repr((message["content"] or str(message["tool_calls"]))[:60])
