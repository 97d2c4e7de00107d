"""Read chat messages: the text of one, the newest turn and observation, the reply in a response."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from empo2.recipe.json_text import dumped

Message = dict[str, Any]

# What programs of agents add to the text of a task; tags of other names may hold the task itself.
_ADDED = re.compile(r"<([\w-]*(?:reminder|environment|context|skills)[\w-]*)>.*?</\1>", re.DOTALL)


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, a list of parts, or nothing."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return ""


def has_images(message: Message) -> bool:
    """Return True if a message's content has a part that is no text, such as an image."""
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type", "text") != "text" for part in content)


def newest_turn(messages: Sequence[Message]) -> int | None:
    """Return the index of the message that takes new tips: the last ``user`` or ``tool`` message after the last reply.

    None if there is no such message. Earlier messages were sent already; changing one would break the prefix.
    """
    for index in range(len(messages) - 1, -1, -1):
        role = messages[index].get("role")
        if role == "assistant":
            return None
        if role in ("user", "tool") and isinstance(messages[index].get("content"), str | list):
            return index
    return None


def newest_observation(messages: Sequence[Message]) -> str:
    """Return the text of the last ``user`` or ``tool`` message that says something new; "" if there is none.

    Blocks such as ``<system-reminder>`` or ``<environment_context>``, which an agent's program adds to each task, are
    left out, unless the newest turn has nothing else.
    """
    whole = ""
    for message in reversed(messages):
        if message.get("role") == "assistant" and whole:
            break
        if message.get("role") in ("user", "tool"):
            text = text_of(message.get("content"))
            if new := _ADDED.sub("", text).strip() if "</" in text else text:
                return new
            whole = whole or text
    return whole


def reply_of(body: dict[str, Any]) -> Message | None:
    """Return the assistant message of a chat completion, or a completion's text as one; None if there is neither."""
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if isinstance(choice.get("message"), dict):
        return {"role": "assistant", **choice["message"]}
    if isinstance(choice.get("text"), str):
        return {"role": "assistant", "content": choice["text"]}
    return None


def spoken(reply: Message) -> str:
    """Return the text of a reply, or its tool calls as text."""
    if reply.get("content"):
        return text_of(reply["content"])
    calls = [call.get("function") or {} for call in reply.get("tool_calls") or []]
    return "; ".join(f"{call.get('name')}({call.get('arguments')})" for call in calls)


def is_beside(body: Mapping[str, Any]) -> bool:
    """Return True for a chat of one turn without tools: of an agent that offers tools, a call beside its main chat."""
    messages = body.get("messages")
    return bool(messages) and not body.get("tools") and all(each.get("role") != "assistant" for each in messages)


def digest(messages: Any) -> bytes:
    """Return 16 bytes that tell messages, or a prompt, from any other."""
    return hashlib.blake2b(dumped(messages, sort_keys=True), digest_size=16).digest()


def digests(messages: Sequence[Message]) -> list[bytes]:
    """Return a digest for each message; element i identifies messages[: i + 1]."""
    hasher, found = hashlib.blake2b(digest_size=16), []
    for message in messages:
        hasher.update(dumped(message, sort_keys=True) + b"\0")
        found.append(hasher.digest())
    return found


def arguments_of(function: dict[str, Any]) -> Any:
    """Return the arguments of a tool call as a value, as vLLM renders them; unchanged if they are no JSON."""
    arguments = function.get("arguments")
    try:
        return json.loads(arguments)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RecursionError):
        return arguments
