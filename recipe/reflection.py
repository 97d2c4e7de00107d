"""A finished episode -> one tip, written by the current policy."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from .injection import Message, text_of

# Ours: what happened, what was learned, how far it was (what to ask for: paper, section on reflection).
_QUESTION = (
    "The episode is over and its final score is {score:g}. Write one note for the next player of this task: what was "
    "tried, what it showed, and how far it was from completing the task. One sentence, at most {words} words, no "
    "preamble."
)
_TRANSCRIPT_CHARACTERS = 12_000


def question(score: float, max_words: int) -> Message:
    """The user message that asks for the tip."""
    return {"role": "user", "content": _QUESTION.format(score=score, words=max_words)}


def reflection_chats(
    chats: Sequence[list[Message]], replies: Sequence[Message], ask: Message
) -> Iterable[list[Message]]:
    """Chats to ask the tip in, the best first; the next one is for when the model refuses one as too long.

    Args:
        chats: each call's messages as they were sent, tips included (so that vLLM has their prefix cached).
        replies: each call's reply.
        ask: the question.
    """
    first, last = chats[0], chats[-1]
    said = sum(message.get("role") == "assistant" for message in last[len(first) :])
    if last[: len(first)] == first and said >= len(chats) - 1:
        yield [*last, _plain(replies[-1]), ask]  # the agent sends its whole chat: the transcript is there
    lines = [
        f"{name}: {text}"
        for chat, reply in zip(chats, replies, strict=True)
        for name, text in (("Observation", text_of(chat[-1].get("content"))), ("Action", spoken(reply)))
    ]
    text = "\n".join(lines)
    for limit in (_TRANSCRIPT_CHARACTERS, _TRANSCRIPT_CHARACTERS // 4):
        end = text if len(text) <= limit else "...\n" + text[-limit:]
        yield [{"role": "user", "content": f"An episode:\n\n{end}\n\n{ask['content']}"}]


def spoken(reply: Message) -> str:
    """What a reply did: its text, or its tool calls as text."""
    if reply.get("content"):
        return text_of(reply["content"])
    calls = [call.get("function") or {} for call in reply.get("tool_calls") or []]
    return "; ".join(f"{call.get('name')}({call.get('arguments')})" for call in calls)


def _plain(reply: Message) -> Message:
    """The reply as a message to send back: without vLLM's extras, which a chat template may trip over."""
    return {key: reply[key] for key in ("role", "content", "tool_calls") if reply.get(key) is not None}


def clean_tip(text: str, special_tokens: Sequence[str]) -> str:
    """One line, without any special token of the model's chat template (one could end the turn that shows the tip)."""
    before = None
    while before != text:  # a space in the place of a token or of a line break may complete a token that holds spaces
        before = text
        for token in special_tokens:
            text = text.replace(token, " ")
        printable = "".join(character if character.isprintable() else " " for character in text)
        text = re.sub(r"\s+", " ", printable).strip()
    return text


def reply_of(body: dict[str, Any]) -> Message | None:
    """The assistant message of a chat completion or the text of a completion; None if the body holds neither."""
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if isinstance(choice.get("message"), dict):
        return {"role": "assistant", **choice["message"]}
    if isinstance(choice.get("text"), str):
        return {"role": "assistant", "content": choice["text"]}
    return None
