"""Keep of each call of an episode what is new: its events grow with its length, not with its square.

A chat repeats all that was said before. `protocol.whole_events` reads what is written here.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from empo2.recipe.messages import shared
from empo2.recipe.protocol import Continued, prompt_and_reply

_CHATS = 16  # of a rollout that may go on: its agent's, its sub-agents'


@dataclass(frozen=True)
class _Chat:
    """A chat as far as it has come: the messages of a call as they were sent, the ids of its prompt and reply."""

    call: int
    messages: Sequence[Any]
    ids: array


class Continuations:
    """The chats of one attempt at a rollout.

    Attributes:
        calls: the number of its calls so far.
        prompt: token ids of the last one's prompt; None if the server has told none.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.prompt: array | None = None
        self._sent: list[_Chat] = []
        self._tip_free: list[_Chat] = []

    def code_call(self, request: dict[str, Any], response: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return request and response of the next call without what an earlier one had; neither is changed."""
        number, self.calls = self.calls, self.calls + 1
        messages, given = request.get("messages"), response.get("prompt_token_ids")
        self.prompt = ids = _array(prompt_and_reply(response)[0])
        if not isinstance(messages, list) or ids is None or not given:
            return request, response
        base, tokens = _base(self._sent, ids)
        first = 0 if base is None else shared(base.messages, messages)
        chat = _Chat(number, messages, ids + _reply(response))
        _keep(self._sent, chat, base if base is not None and first == len(base.messages) else None)
        if base is None:
            return request, response
        prompt = Continued(call=base.call, first=tokens, more=given[tokens:])
        coded = {"messages": Continued(call=base.call, first=first, more=messages[first:])}
        if request.get("prompt_token_ids") == given:
            coded["prompt_token_ids"] = prompt
        return {**request, **coded}, {**response, "prompt_token_ids": prompt}

    def code_tip_free(self, call: int, prompt: list[int], response: dict[str, Any]) -> list[int] | Continued:
        """Return the tip-free prompt of a call without what that of an earlier one had."""
        ids = _array(prompt)
        if ids is None:
            return prompt
        base, tokens = _base(self._tip_free, ids)
        whole = base is not None and tokens == len(base.ids)
        _keep(self._tip_free, _Chat(call, (), ids + _reply(response)), base if whole else None)
        return prompt if base is None else Continued(call=base.call, first=tokens, more=prompt[tokens:])


def _keep(chats: list[_Chat], chat: _Chat, goes_on_from: _Chat | None) -> None:
    chats[:] = [*(each for each in chats if each is not goes_on_from), chat][-_CHATS:]


def _base(chats: Sequence[_Chat], ids: array) -> tuple[_Chat | None, int]:
    """Return the chat that a prompt has most of its first ids in common with, and how many."""
    for chat in reversed(chats):
        if ids[: len(chat.ids)] == chat.ids:
            return chat, len(chat.ids)
    alike = [_begin(chat.ids, ids) for chat in chats]
    place = max(reversed(range(len(chats))), key=alike.__getitem__, default=None)
    return (None, 0) if place is None else (chats[place], alike[place])


def _begin(before: array, ids: array) -> int:
    """Return how many token ids two prompts begin with alike."""
    length = min(len(before), len(ids))
    differs = np.frombuffer(before, np.int32)[:length] != np.frombuffer(ids, np.int32)[:length]
    place = int(differs.argmax())
    return place if differs[place] else length


def _reply(response: dict[str, Any]) -> array:
    return _array(prompt_and_reply(response)[1]) or array("i")


def _array(ids: Any) -> array | None:
    """Return a server's token ids; None if it has sent something else, which stays as it is."""
    try:
        return array("i", ids) if isinstance(ids, list) and ids else None
    except (TypeError, OverflowError):
        return None
