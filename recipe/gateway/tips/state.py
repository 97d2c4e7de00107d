"""The state of an episode: the text that is embedded to find tips and to count visits (chosen in docs/states.md)."""

import re
from collections.abc import Sequence

import structlog

from empo2.recipe.config import Memory, imported
from empo2.recipe.messages import Message, newest_message, newest_observation, shortened

log = structlog.get_logger()

_REGEX = "regex:"


class StateReader:
    """Read the state from a request, as ``memory.state`` says.

    Raises ConfigError if it names a function that cannot be imported.
    """

    def __init__(self, memory: Memory) -> None:
        self._state, self._characters = memory.state, memory.state_characters
        self._pattern, self._function = None, None
        if self._state.startswith(_REGEX):
            self._pattern = re.compile(self._state.removeprefix(_REGEX))
        elif self._state not in ("beginning", "end"):
            self._function = imported(self._state, "memory.state")

    def of_chat(self, messages: Sequence[Message]) -> str:
        """Return the state of a chat; "" if it has none.

        By default it is the newest observation, the last ``user`` or ``tool`` message. The task is left out: it is the
        same in all states of an episode and would make them similar. Usually only the first message of an episode
        states it; ``memory.scope`` can separate the tasks in all others.
        """
        if self._function is not None:
            try:
                return str(self._function(messages))[: self._characters]
            except Exception as error:  # the agent's call goes on, without tips
                log.error("memory.state failed", function=self._state, error=repr(error)[:200])
                return ""
        role, text = newest_message(messages)
        if self._state == "beginning":  # of a tool's result its end, too: there it says how it went
            return shortened(text, self._characters) if role == "tool" else text[: self._characters]
        last = None
        if self._pattern is not None:
            *_, last = (None, *self._pattern.finditer(text))
        if last is None:
            return text[-self._characters :]
        return (last[1] if last.re.groups and last[1] is not None else last[0])[: self._characters]

    def of_prompt(self, prompt: str) -> str:
        """Return the state of a ``completions`` prompt: its end, which holds the newest observation.

        A regular expression or a function is asked as if the prompt were a chat of one message.
        """
        messages = [{"role": "user", "content": prompt}]
        if self._state == "beginning":
            return newest_observation(messages)[-self._characters :]
        return self.of_chat(messages)
