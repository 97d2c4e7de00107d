"""Read chat messages: the text of one, the newest turn and observation, the reply in a response."""

import hashlib
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import batched, takewhile
from typing import Any

from empo2.recipe.json_text import dumped, loaded

Message = dict[str, Any]

# What programs of agents add to the text of a task, in a block; tags of other names may hold the task itself.
_BEGINS = re.compile(r"<([\w-]{0,40}(?:reminder|environment|context|skills)[\w-]{0,40})>")
_ENDS = re.compile(r"</([\w-]{1,100})>")
# What agents ask where a chat nears the end of the context (Claude Code, Codex, Cline, OpenCode, pi, Qwen Code).
_SUMMARY = re.compile(
    r"\bsummar(?:y|i[sz])[^.]{0,120}\b(?:conversation|context|chat|session|history)\b"
    r"|\b(?:conversation|context|chat|session|history)\b[^.]{0,120}\bsummar(?:y|i[sz])"
    r"|\bcontext\b[^.]{0,40}\bcompact|respond with text only"
)
_SUMMARY_WORDS = ("summar", "compact", "respond")  # one is in whatever matches; they are found at a tenth of the CPU
_SUMMARY_CHARACTERS = 600


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many elements, such as messages or token ids, two lists begin with alike."""
    if other[: len(one)] == one:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


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
    """Return the index of the message that takes new tips: the last one after the last reply that says something new.

    None if there is no ``user`` or ``tool`` message after it. Earlier messages were sent already; changing one would
    break the prefix.
    """
    place = None
    for index in range(len(messages) - 1, -1, -1):
        role, content = messages[index].get("role"), messages[index].get("content")
        if role == "assistant":
            break
        if role in ("user", "tool") and isinstance(content, str | list):
            if _new_in(text_of(content)):
                return index
            place = index if place is None else place
    return place


def newest_message(messages: Sequence[Message]) -> tuple[str, str]:
    """Return role and text of the last ``user`` or ``tool`` message that says something new; "" if there is none.

    Blocks such as ``<system-reminder>`` or ``<environment_context>``, which an agent's program adds to each task, are
    left out, unless the newest turn has nothing else.
    """
    whole = "", ""
    for message in reversed(messages):
        role = message.get("role")
        if role == "assistant" and whole[1]:
            break
        if role in ("user", "tool"):
            text = text_of(message.get("content"))
            if new := _new_in(text):
                return role, new
            whole = whole if whole[1] else (role, text)
    return whole


def newest_observation(messages: Sequence[Message]) -> str:
    """Return the text of `newest_message`."""
    return newest_message(messages)[1]


def _blocks(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield where each added block begins and ends, and its name; in linear time, as an agent may write many."""
    if "</" not in text:
        return
    ends: defaultdict[str, list[int]] = defaultdict(list)
    for match in _ENDS.finditer(text):
        ends[match[1]].append(match.end())
    place = 0
    while match := _BEGINS.search(text, place):
        place, after = match.end(), ends[match[1]]
        if (number := bisect_right(after, place)) < len(after):
            place = after[number]
            yield match.start(), place, match[1]


def _new_in(text: str) -> str:
    if not (blocks := [*_blocks(text)]):
        return text
    places = [0, *(place for begin, end, _ in blocks for place in (begin, end)), len(text)]
    return "".join(text[begin:end] for begin, end in batched(places, 2)).strip()


def added_blocks(messages: Sequence[Message]) -> set[str]:
    """Return the names of the blocks that are left out of states."""
    said = (text_of(each.get("content")) for each in messages if each.get("role") in ("user", "tool"))
    return {name for text in said for _, _, name in _blocks(text)}


def task_in(content: str | list[Any]) -> tuple[int, int]:
    """Return where new text begins in a message, after the blocks before it: a part's number, and a place in its text.

    Both are 0 if there are only blocks. Of a string the number is 0.
    """
    texts = [content] if isinstance(content, str) else [text_of([part]) for part in content]
    for number, text in enumerate(texts):
        if _new_in(text) or not text:
            place = 0
            for begin, end, _ in _blocks(text):
                if text[place:begin].strip():
                    break
                place = end
            return number, place and len(text) - len(text[place:].lstrip())
    return 0, 0


def shortened(text: str, characters: int) -> str:
    """Return a text with at most so many characters of it, without its middle."""
    if len(text) <= characters:
        return text
    return f"{text[: characters - characters // 2]} ... {text[len(text) - characters // 2 :]}"


def reply_of(body: dict[str, Any]) -> Message | None:
    """Return the assistant message of a chat completion, or a completion's text as one; None if there is neither."""
    match body.get("choices"):
        case [{"message": dict(message)}, *_]:
            return {"role": "assistant", **message}
        case [{"text": str(text)}, *_]:
            return {"role": "assistant", "content": text}
        case _:
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


def is_compaction(body: Mapping[str, Any], *, with_tools: bool) -> bool:
    """Return True for a call that asks for a summary of the chat, in whose place the agent goes on from the summary.

    It is the main chat with a new message, or, of an agent that offers tools (``with_tools``), one without any.
    """
    messages = body.get("messages")
    if not messages:
        return False
    role, newest = newest_message(messages)
    asked = newest if role == "user" and any(each.get("role") == "assistant" for each in messages) else ""
    if with_tools and not body.get("tools") and messages[0].get("role") == "system":
        asked = f"{text_of(messages[0].get('content'))[:_SUMMARY_CHARACTERS]}\n.{asked}"
    asked = asked[: 2 * _SUMMARY_CHARACTERS].casefold()
    return any(word in asked for word in _SUMMARY_WORDS) and bool(_SUMMARY.search(asked))


def digest(messages: Any) -> bytes:
    """Return 16 bytes that tell messages, or a prompt, from any other."""
    return hashlib.blake2b(dumped(messages, sort_keys=True), digest_size=16).digest()


def opening_of(body: Mapping[str, Any]) -> bytes:
    """Return a digest of a chat's messages before its first reply, or of a completion's prompt."""
    if isinstance(messages := body.get("messages"), list):
        return digest([*takewhile(lambda message: message.get("role") != "assistant", messages)])
    return digest(body.get("prompt"))


def digests(messages: Sequence[Message]) -> list[bytes]:
    """Return a digest for each message; element i identifies messages[: i + 1]."""
    hasher, found = hashlib.blake2b(digest_size=16), []
    for message in messages:
        hasher.update(dumped(message, sort_keys=True) + b"\0")
        found.append(hasher.digest())
    return found


def arguments_of(function: dict[str, Any]) -> Any:
    """Return the arguments of a tool call as a value, as vLLM renders them; unchanged if JSON cannot carry them."""
    arguments = function.get("arguments")
    try:
        return loaded(arguments)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return arguments
