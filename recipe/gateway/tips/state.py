"""The state of an episode: the text that is embedded to find tips and to count visits (chosen in docs/states.md)."""

import re
from collections.abc import Callable, Sequence

import structlog

from empo2.recipe.config import Memory, imported
from empo2.recipe.messages import Message, newest_message, newest_observation, shortened

log = structlog.get_logger()

_REGEX = "regex:"

type Part = Callable[[Sequence[Message]], str]


class StateReader:
    """Read the state from a request, as ``memory.state`` says.

    Raises ConfigError if it names a function that cannot be imported.
    """

    def __init__(self, memory: Memory) -> None:
        self._characters = memory.state_characters
        self._of_chat = _part(memory.state, self._characters)
        self._of_prompt = _part("end", self._characters) if memory.state == "beginning" else self._of_chat

    def of_chat(self, messages: Sequence[Message]) -> str:
        """Return the state of a chat; "" if it has none.

        By default it is the newest observation, the last ``user`` or ``tool`` message. The task is left out: it is the
        same in all states of an episode and would make them similar. Usually only the first message of an episode
        states it; ``memory.scope`` can separate the tasks in all others.
        """
        return self._of_chat(messages)

    def of_prompt(self, prompt: str) -> str:
        """Return the state of a ``completions`` prompt: its end, which holds the newest observation.

        A regular expression or a function is asked as if the prompt were a chat of one message.
        """
        return self._of_prompt([{"role": "user", "content": prompt}])


def _part(state: str, characters: int) -> Part:
    if state == "beginning":
        return lambda messages: _beginning(messages, characters)
    if state == "end":
        return lambda messages: newest_observation(messages)[-characters:]
    if state.startswith(_REGEX):
        return _last_match(re.compile(state.removeprefix(_REGEX)), characters)
    return _function(state, characters)


def _beginning(messages: Sequence[Message], characters: int) -> str:
    """Return the beginning of the newest observation; of a tool's result its end, too: there it says how it went."""
    role, text = newest_message(messages)
    return shortened(text, characters) if role == "tool" else text[:characters]


def _last_match(pattern: re.Pattern[str], characters: int) -> Part:
    def part(messages: Sequence[Message]) -> str:
        text = newest_observation(messages)
        *_, last = (None, *pattern.finditer(text))
        if last is None:
            return text[-characters:]
        return (last[1] if pattern.groups and last[1] is not None else last[0])[:characters]

    return part


def _function(name: str, characters: int) -> Part:
    function = imported(name, "memory.state")

    def part(messages: Sequence[Message]) -> str:
        try:
            return str(function(messages))[:characters]
        except Exception as error:  # the agent's call goes on, without tips
            log.error("memory.state failed", function=name, error=repr(error)[:200])
            return ""

    return part
