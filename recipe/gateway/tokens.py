"""Prompts as token ids: a chat that goes on continues from the ids that were sampled, not from its replies as text.

A text has many tokenizations. A policy samples any of them, and a server that is sent the reply back as text makes its
own: the next prompt then no longer extends the last one, and the turns do not merge into one training row. Where the
chat only grew, the server is therefore sent the last prompt, the sampled ids and the ids of the new turn
(`gateway.cumulative_tokens`). The new turn is what the server's own rendering of the chat has after the reply.
"""

import asyncio
import hashlib
import json
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.tokenizer import PolicyTokenizer
from empo2.recipe.messages import Message, reply_of, text_of

log = structlog.get_logger()

Body = dict[str, Any]
Ids = array  # of C ints: an episode has one prompt for each turn

# Understood by vLLM's chat completions with ``recipe/trainer/compat/prompt_ids.py``.
FIELD = "prompt_token_ids"
# The fields of a chat completion that decide how vLLM renders its prompt (vLLM 0.20 TokenizeChatRequest).
_RENDERING = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "prompt",
)
# These decide it too, but TokenizeChatRequest accepts them only as arguments of the template.
TEMPLATE_ARGUMENTS = ("documents", "reasoning_effort")
_TOKENIZE_SECONDS = 60


@dataclass(frozen=True)
class Prompt:
    """The prompt of one call.

    Attributes:
        ids: as the model is given it.
        rendered: as the server renders and tokenizes the chat; the same until a reply was tokenized differently.
    """

    ids: Ids
    rendered: Ids


@dataclass(frozen=True)
class Reply:
    """A reply, as it was sampled.

    Attributes:
        prompt: that it answers; pending while the server still renders it.
        rendering: the fields of the request, other than the messages, that decide how it is rendered.
        said: the message, in a form in which an agent's copy of it is equal.
        ids: sampled, the end of the turn included.
        cut: True if it met its length limit, so that it has no end of turn.
        problem: why no chat can continue from the ids; "" if one can.
    """

    prompt: asyncio.Future[Prompt]
    rendering: Body
    said: tuple[Any, ...]
    ids: Ids
    cut: bool
    problem: str


class AsText(Exception):
    """A chat cannot continue from sampled ids; its argument is the reason, in a word."""


class Replies:
    """The replies of one episode, by the chats that they answer."""

    def __init__(self) -> None:
        self._of_chat: defaultdict[bytes, list[Reply]] = defaultdict(list)

    def add(self, body: Body, prompt: asyncio.Future[Prompt], response: Body) -> None:
        """Keep the reply to a chat; a response without token ids, or without a message, is left out."""
        message, choice = reply_of(response), (response.get("choices") or [{}])[0]
        if message is None or not choice.get("token_ids") or not isinstance(body.get("messages"), list):
            return
        thought = message.get("reasoning") or message.get("reasoning_content")
        problem = "reasoning" if thought else "stop" if isinstance(choice.get("stop_reason"), str) else ""
        ids, cut = array("i", choice["token_ids"]), choice.get("finish_reason") == "length"
        self._of_chat[_digest(body["messages"])].append(
            Reply(prompt, _rendering(body), _said(message), ids, cut, problem)
        )

    def last_in(self, body: Body) -> Reply | None:
        """Return the reply that a chat goes on from; None if there is none in it.

        Raises:
            AsText: the chat's last reply is none that was sampled here, or tools and the like are others now.
        """
        messages = body.get("messages")
        place = _last_reply(messages) if isinstance(messages, list) else None
        if place is None:
            return None
        said = _said(messages[place])
        found = [reply for reply in self._of_chat.get(_digest(messages[:place]), ()) if reply.said == said]
        if not found:
            raise AsText("history")
        rendering = _rendering(body)
        same = [reply for reply in found if reply.rendering == rendering]
        if not same:
            raise AsText("tools")
        return same[-1]


class ChatTokens:
    """The token ids of one call of an episode: `fields` are sent with it, `answered` keeps its reply."""

    @classmethod
    async def prepare(cls, services: Services, rollout_id: str, replies: Replies, body: Body) -> "ChatTokens":
        """Find what the chat goes on from and, with ``gateway.cumulative_tokens``, its ids. Never raises."""
        last, prompt = None, None
        try:
            last = replies.last_in(body)
            if last is not None and services.settings.gateway.cumulative_tokens:
                prompt = await continued(services, rollout_id, last, body)
        except Exception as error:
            if not isinstance(error, AsText):
                log.error("no token ids of a chat", rollout_id=rollout_id, error=described(error))
            _count_text(services, str(error) if isinstance(error, AsText) else "failed")
        return cls(services, replies, body, last, prompt)

    def __init__(
        self, services: Services, replies: Replies, body: Body, last: Reply | None, prompt: Prompt | None
    ) -> None:
        self._services = services
        self._replies = replies
        self._body = body
        self._last = last
        self._prompt = prompt
        longer = prompt is not None and prompt.ids != prompt.rendered
        self.fields: Body = {FIELD: prompt.ids.tolist()} if prompt is not None and longer else {}

    def answered(self, response: Body, prompt_ids: list[int]) -> None:
        """Keep the reply, and count whether the server tokenizes the one before it as it was sampled."""
        seen = array("i", prompt_ids)
        prompt = Prompt(seen, seen)
        if self.fields:
            if self._prompt is not None and self._prompt.ids == seen:
                prompt = self._prompt
                self._services.metrics.counts["continued_calls"] += 1
            else:  # a server that does not know the field
                _count_text(self._services, "ignored")
        if self._last is not None and self._last.prompt.done():
            counts = self._services.metrics.counts
            counts["continuing_calls"] += 1
            counts["drifted_calls"] += (
                _after(self._last.prompt.result().rendered, self._last.ids, prompt.rendered) is None
            )
        known = asyncio.get_running_loop().create_future()
        known.set_result(prompt)
        self._replies.add(self._body, known, response)


def prompt_ids_of(response: Body) -> list[int]:
    """Return the prompt ids in vLLM's answer to a chat completion or a completion; [] if there are none."""
    choices = response.get("choices") or [{}]
    return response.get("prompt_token_ids") or choices[0].get("prompt_token_ids") or []


async def tip_free(services: Services, rollout_id: str, replies: Replies, body: Body) -> Prompt:
    """Return the prompt of a chat that is not sent, continued as one that is.

    Raises:
        httpx.HTTPError: the server does not render it.
    """
    if services.settings.gateway.cumulative_tokens:
        try:
            last = replies.last_in(body)
            if last is not None and (prompt := await continued(services, rollout_id, last, body)) is not None:
                return prompt
        except Exception as error:
            if not isinstance(error, AsText):
                log.error("no token ids of a chat without tips", rollout_id=rollout_id, error=described(error))
    rendered = await _rendered(services, rollout_id, body)
    return Prompt(rendered, rendered)


async def continued(services: Services, rollout_id: str, last: Reply, body: Body) -> Prompt:
    """Return the prompt of a chat that goes on from a sampled reply.

    Raises:
        AsText: it cannot.
        httpx.HTTPError: the server does not render it.
    """
    if last.problem:
        raise AsText(last.problem)
    if any(_has_images(message) for message in body["messages"]):
        raise AsText("images")
    before, rendered = await asyncio.gather(last.prompt, _rendered(services, rollout_id, body))
    turn = _after(before.rendered, last.ids, rendered)
    if turn is None:
        reply = _last_reply(body["messages"])
        assert reply is not None and isinstance(services.tokenizer, PolicyTokenizer)
        closed = {**body, "messages": body["messages"][: reply + 1], "add_generation_prompt": False}
        turn = new_turn(
            services.tokenizer, last, before.rendered, await _rendered(services, rollout_id, closed), rendered
        )
    return Prompt(before.ids + last.ids + turn, rendered)


def new_turn(tokenizer: PolicyTokenizer, reply: Reply, before: Ids, closed: Ids, rendered: Ids) -> Ids:
    """Return the ids after a reply that the server tokenizes differently.

    Args:
        before: the rendering of the chat that the reply answers, which ends where the reply begins.
        closed: of that chat with the reply, which ends after the reply's turn.
        rendered: of the whole chat. As texts, each must begin with the one before it: else the template writes the
            history anew, such as without thoughts, and that is what the model shall see.

    Raises:
        AsText: they do not, or how the template ends a turn cannot be told.
    """
    end = next((place for place in reversed(range(len(closed))) if closed[place] in tokenizer.special_ids), None)
    text = tokenizer.text
    if (
        end is None
        or not text(closed[:end]).startswith(text(before))
        or not text(rendered).startswith(text(closed))
        or rendered[: end + 1] != closed[: end + 1]
    ):
        raise AsText("template")
    if reply.ids[-1] == closed[end]:
        return rendered[end + 1 :]
    if reply.cut:
        return rendered[end:]
    raise AsText("template")  # the model ended its turn by another token than the template does


def _after(before: Ids, reply: Ids, rendered: Ids) -> Ids | None:
    """Return the ids after prompt and reply; None if the rendering does not begin with them."""
    said = before + reply
    return rendered[len(said) :] if rendered[: len(said)] == said else None


async def _rendered(services: Services, rollout_id: str, body: Body) -> Ids:
    """Ask the server for the prompt ids of a request."""
    request = {name: body[name] for name in _RENDERING if name in body}
    if arguments := {name: body[name] for name in TEMPLATE_ARGUMENTS if body.get(name) is not None}:
        request["chat_template_kwargs"] = (body.get("chat_template_kwargs") or {}) | arguments
    response = await services.servers.post(rollout_id, "/tokenize", request, timeout=_TOKENIZE_SECONDS)
    response.raise_for_status()
    return array("i", response.json()["tokens"])


def _count_text(services: Services, reason: str) -> None:
    if services.settings.gateway.cumulative_tokens:
        services.metrics.counts["text_calls"] += 1
        services.metrics.counts[f"text_calls/{reason}"] += 1


def _rendering(body: Body) -> Body:
    return {name: body[name] for name in (*_RENDERING, *TEMPLATE_ARGUMENTS) if name in body and name != "messages"}


def _digest(messages: Sequence[Message]) -> bytes:
    return hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=16).digest()


def _last_reply(messages: Sequence[Message]) -> int | None:
    return next((place for place in reversed(range(len(messages))) if messages[place].get("role") == "assistant"), None)


def _said(message: Message) -> tuple[Any, ...]:
    """Return a message's text and tool calls; clients write an empty content, and arguments, in different ways."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or []]
    return text_of(message.get("content")), *((call.get("name"), _parsed(call.get("arguments"))) for call in calls)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments


def _has_images(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type", "text") != "text" for part in content)
