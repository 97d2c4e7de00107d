"""The state of an episode as text: what is embedded to find tips and to count visits."""

from collections.abc import Sequence

from empo2.recipe.messages import Message, text_of

# The state that is embedded: the newest observation first, since MiniLM reads no more than 256 word pieces.
_OBSERVATION_CHARACTERS, _TASK_CHARACTERS = 1200, 400


def chat_state(messages: Sequence[Message]) -> str:
    """The current state: newest observation, then the task (the first paragraph of the first user message)."""
    users = [message for message in messages if message.get("role") in ("user", "tool")]
    if not users:
        return ""
    task, observation = text_of(users[0].get("content")), text_of(users[-1].get("content"))
    return observation[:_OBSERVATION_CHARACTERS] + ("\n" + _task(task) if len(users) > 1 else "")


def prompt_state(prompt: str) -> str:
    """The same for a ``completions`` prompt, whose end is the newest observation and whose beginning is the task."""
    if len(prompt) <= _OBSERVATION_CHARACTERS:
        return prompt
    return prompt[-_OBSERVATION_CHARACTERS:] + "\n" + _task(prompt)


def _task(text: str) -> str:
    # What follows is often the first observation: it is no part of a later state, and to embed it doubles the cost.
    return text.strip().partition("\n\n")[0][:_TASK_CHARACTERS]
