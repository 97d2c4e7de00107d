"""The state of an episode: the text that is embedded to find tips and to count visits (chosen in docs/states.md)."""

from collections.abc import Sequence

from empo2.recipe.messages import Message, newest_observation

_CHARACTERS = 1200  # MiniLM reads no more than 256 word pieces


def chat_state(messages: Sequence[Message]) -> str:
    """Return the newest observation, the last ``user`` or ``tool`` message; "" if there is none.

    The task is left out: it is the same in all states of an episode and would make them similar. Usually only the
    first message of an episode states it; ``memory.scope`` separates the tasks in all others.
    """
    return newest_observation(messages)[:_CHARACTERS]


def prompt_state(prompt: str) -> str:
    """Return the end of a ``completions`` prompt, which holds the newest observation."""
    return prompt[-_CHARACTERS:]
