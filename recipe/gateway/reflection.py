"""A finished episode -> the chats in which the current policy is asked for its tip."""

from collections.abc import Iterable, Sequence

from empo2.recipe.config import Reflection
from empo2.recipe.messages import Message, spoken, text_of


def question(settings: Reflection, score: float, success: bool) -> Message:
    """The user message that asks for the tip."""
    outcome = "the task was completed" if success else "the task was not completed"
    prompt = settings.prompt.format(score=f"{score:g}", outcome=outcome, words=settings.max_words)
    return {"role": "user", "content": prompt}


def reflection_chats(
    settings: Reflection, chats: Sequence[list[Message]], replies: Sequence[Message], ask: Message
) -> Iterable[list[Message]]:
    """Chats to ask the tip in, the best first; the next one is for when the model refuses one as too long.

    Args:
        settings: `sees` leaves the episode's own chat out, `transcript_characters` is how much of a transcript is kept.
        chats: each call's messages as they were sent, tips included (so that vLLM has their prefix cached).
        replies: each call's reply.
        ask: the question.
    """
    first, last = chats[0], chats[-1]
    said = sum(message.get("role") == "assistant" for message in last[len(first) :])
    if settings.sees == "chat" and last[: len(first)] == first and said >= len(chats) - 1:
        yield [*last, _plain(replies[-1]), ask]  # the agent sends its whole chat: the transcript is there
    lines = [
        f"{name}: {text}"
        for chat, reply in zip(chats, replies, strict=True)
        for name, text in (("Observation", text_of(chat[-1].get("content"))), ("Action", spoken(reply)))
    ]
    text = "\n".join(lines)
    for limit in (settings.transcript_characters, max(settings.transcript_characters // 4, 1)):
        end = text if len(text) <= limit else "...\n" + text[-limit:]
        yield [{"role": "user", "content": f"An episode:\n\n{end}\n\n{ask['content']}"}]


def _plain(reply: Message) -> Message:
    """The reply as a message to send back: without vLLM's extras, which a chat template may trip over."""
    return {key: reply[key] for key in ("role", "content", "tool_calls") if reply.get(key) is not None}
