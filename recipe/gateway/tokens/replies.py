"""The replies of an episode as they were sampled: found again by the chats that go on from them, put back into chats.

Clients add defaults of a tool's schema, mend or drop arguments that are no JSON, and drop thoughts. The chat would then
no longer extend what the model saw, and each such reply would open a training row.
"""

import asyncio
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from empo2.recipe.gateway.normal_form import normal_message
from empo2.recipe.gateway.request import Body
from empo2.recipe.gateway.tokens.rendering import rendering_of
from empo2.recipe.messages import Message, arguments_of, digest, reply_of, text_of

Ids = array  # of C ints: an episode has one prompt for each turn


@dataclass(frozen=True)
class Prompt:
    """The prompt of one call."""

    ids: Ids  # as the model is given it
    rendered: Ids  # as the server renders and tokenizes the chat; the same until a reply was tokenized differently


@dataclass(frozen=True)
class Reply:
    """A reply, as it was sampled."""

    prompt: asyncio.Future[Prompt]  # that it answers; pending while the server still renders it
    rendering: Body  # the fields of the request, other than the messages, that decide how it is rendered
    said: tuple[Any, ...]  # the message, in a form in which an agent's copy of it is equal
    ids: Ids  # sampled, the end of the turn included
    cut: bool  # True if it met its length limit, so that it has no end of turn
    stopped: bool  # True if it ended at a string of the request's ``stop``, so that no chat can continue from the ids
    thoughts: str  # that vLLM took out of the text; "" for none


class AsText(Exception):
    """A chat cannot continue from sampled ids; its argument is the reason, in a word."""


class Replies:
    """The replies of one episode, by the chats that they answer.

    Attributes:
        sampled: their messages, to be put back where a client changes them.
    """

    def __init__(self) -> None:
        self._of_chat: defaultdict[bytes, list[Reply]] = defaultdict(list)
        self.sampled = SampledMessages()

    def add(self, body: Body, prompt: asyncio.Future[Prompt], response: Body, *, sent: bool = True) -> None:
        """Keep the reply to a chat; a response without token ids, or without a message, is left out.

        Args:
            sent: False for the chat without the tips that it was sent with: its reply is kept already.
        """
        message, choice = reply_of(response), (response.get("choices") or [{}])[0]
        if message is None or not choice.get("token_ids") or not isinstance(body.get("messages"), list):
            return
        sampled = self.sampled.add(message) if sent else normal_message(message)
        reply = Reply(
            prompt,
            rendering_of(body),
            _said(sampled),
            array("i", choice["token_ids"]),
            cut=choice.get("finish_reason") == "length",
            stopped=isinstance(choice.get("stop_reason"), str),
            thoughts=sampled.get("reasoning", ""),
        )
        self._of_chat[digest(body["messages"])].append(reply)

    def last_in(self, body: Body) -> Reply | None:
        """Return the reply that a chat goes on from; None if there is none in it, or no call was answered yet.

        Raises:
            AsText: the chat's last reply is none that was sampled here, or tools and the like are others now.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not self._of_chat or (place := last_reply(messages)) is None:
            return None
        said = _said(messages[place])
        found = [reply for reply in self._of_chat.get(digest(messages[:place]), ()) if reply.said == said]
        if not found:
            raise AsText("history")
        rendering = rendering_of(body)
        same = [reply for reply in found if reply.rendering == rendering]
        if not same:
            raise AsText("tools")
        return same[-1]


def last_reply(messages: Sequence[Message]) -> int | None:
    """Return the index of a chat's last reply; None if there is none."""
    return next((place for place in reversed(range(len(messages))) if messages[place].get("role") == "assistant"), None)


def _said(message: Message) -> tuple[Any, ...]:
    """Return a message's text and tool calls; clients write an empty content, and arguments, in different ways."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or []]
    return text_of(message.get("content")), *((call.get("name"), arguments_of(call)) for call in calls)


class SampledMessages:
    """The messages that a policy replied with in one episode, known by the ids of their tool calls or by their text."""

    def __init__(self) -> None:
        # By the id of each call, and whether the arguments of all calls of the message were JSON objects.
        self._by_call: dict[str, tuple[Message, bool]] = {}
        self._by_text: defaultdict[str, list[Message]] = defaultdict(list)  # of those without calls, in their order

    def add(self, message: Message) -> Message:
        """Keep a reply, as the model server gave it, and return its normal form."""
        form = normal_message(message)
        if calls := message.get("tool_calls"):
            parsed = all(isinstance(arguments_of(call["function"]), dict) for call in calls)
            self._by_call |= {call["id"]: (form, parsed) for call in calls}
        else:
            self._by_text[_text(form)].append(form)
        return form

    def restored(self, body: Body) -> Body:
        """Return a chat in normal form with its replies as they were sampled.

        A reply is put back if its tools and their arguments agree after the schema's defaults, or if the sampled
        arguments did not parse. Any other change is the agent's own, and stays.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not (self._by_call or self._by_text):
            return body
        defaults, seen = _defaults(body.get("tools")), Counter[str]()
        chat = [(each.get("role") == "assistant" and self._sampled(each, defaults, seen)) or each for each in messages]
        return body if chat == messages else {**body, "messages": chat}

    def _sampled(self, message: Message, defaults: Mapping[str, Body], seen: Counter[str]) -> Message | None:
        text, calls = _text(message), message.get("tool_calls")
        if not calls:
            seen[text] += 1
            same = self._by_text.get(text, [])
            return same[min(seen[text], len(same)) - 1] if same else None
        sampled, parsed = self._by_call.get(calls[0].get("id"), (None, False))
        if sampled is None or text not in ("", _text(sampled)):
            return None
        given, own = ([_filled(call, defaults) for call in each] for each in (calls, sampled["tool_calls"]))
        return sampled if given == own or not parsed else None


def _text(message: Message) -> str:
    return text_of(message.get("content")).strip()


def _defaults(tools: Any) -> dict[str, Body]:
    """Return for each tool the arguments that its schema has defaults for, and these."""
    found = {}
    for tool in tools if isinstance(tools, list) else ():
        match tool:
            case {"function": {"name": str(function), "parameters": {"properties": dict(properties)}}}:
                found[function] = {
                    name: each["default"]
                    for name, each in properties.items()
                    if isinstance(each, dict) and "default" in each  # `true` is a schema, too
                }
    return found


def _filled(call: Body, defaults: Mapping[str, Body]) -> tuple[Any, Body]:
    """Return the name of a call's tool, and its arguments with the defaults of the schema."""
    function = call["function"]
    return function["name"], {**defaults.get(function["name"], {}), **arguments_of(function)}
