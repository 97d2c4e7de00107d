"""The state of an episode as text: what is embedded to find tips and to count visits (measured: docs/states.md)."""

from collections.abc import Sequence

from empo2.recipe.messages import Message, text_of

_CHARACTERS = 1200  # MiniLM reads no more than 256 word pieces


def chat_state(messages: Sequence[Message]) -> str:
    """Return the newest observation: the last ``user`` or ``tool`` message; "" where there is none.

    Without the task, which is the same in all states of an episode: added to each, it makes them similar. The first
    message of an episode usually states it; ``memory.scope`` tells tasks apart in all others.
    """
    for message in reversed(messages):
        if message.get("role") in ("user", "tool"):
            return text_of(message.get("content"))[:_CHARACTERS]
    return ""


def prompt_state(prompt: str) -> str:
    """Return the end of a ``completions`` prompt, where the newest observation stands."""
    return prompt[-_CHARACTERS:]
