"""The replies of an episode as they were sampled, found again by the chats that go on from them."""

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from empo2.recipe.gateway.normal_form import normal_message
from empo2.recipe.gateway.request import Body
from empo2.recipe.gateway.tokens.rendering import rendering_of
from empo2.recipe.gateway.tokens.sampled_messages import SampledMessages
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

    def add(self, body: Body, prompt: asyncio.Future[Prompt], response: Body) -> None:
        """Keep the reply to a chat; a response without token ids, or without a message, is left out."""
        message, choice = reply_of(response), (response.get("choices") or [{}])[0]
        if message is None or not choice.get("token_ids") or not isinstance(body.get("messages"), list):
            return
        sampled = normal_message(message)
        self.sampled.add(message)
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
