"""Show which states a recorded episode has, and how a prompt with tips will look."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from empo2.memory import SentenceEmbedder
from empo2.recipe.gateway.tips.injection import with_block
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.gateway.told_apart import trouble
from empo2.recipe.messages import Message, newest_observation, newest_turn, text_of
from empo2.recipe.retrofit.recorder import Call
from empo2.recipe.tip_block import render_tips

_CHARACTERS = 70
_LINES = 8
_FOREIGN = 0.1
_TIP = "(what the policy wrote about an earlier episode)"


def describe_states(calls: Sequence[Call], reader: StateReader) -> Iterator[tuple[str, str]]:
    """Yield labels and lines for the user, of those answered and trained calls that have a chat."""
    chats = [call.body["messages"] for call in calls if "messages" in call.body]
    if not chats:
        return
    states = states_of(calls, reader)
    begun = (state if len(state) <= _CHARACTERS else f"{state[:_CHARACTERS]}..." for state in states[:3])
    shown = ", ".join(map(repr, begun))
    yield "state", f"{shown}{', ...' if len(states) > 3 else ''}"
    if trouble := _indistinct(chats, reader):
        yield "note", trouble
    chat = chats[0]
    if (index := newest_turn(chat)) is not None:
        text = text_of(with_block(chat[index], render_tips([_TIP])).get("content"))
        lines = text.splitlines()
        cut = lines[:_LINES] + ["..."] * (len(lines) > _LINES)
        yield "tips", "\n".join(["stand before the task in the newest message, here of the first call:", *cut])


def states_of(calls: Sequence[Call], reader: StateReader) -> list[str]:
    """Return the unequal states of the calls that have a chat."""
    return list(dict.fromkeys(reader.of_chat(call.body["messages"]) for call in calls if "messages" in call.body))


def embedder_trouble(states: Sequence[str], embedder: str) -> str:
    """Return why ``memory.embedder`` cannot tell states apart; "" if it can.

    It is loaded, which takes seconds, only where many letters are not English.
    """
    foreign = [text for text in states if sum(not each.isascii() for each in text) > _FOREIGN * len(text)]
    return trouble(SentenceEmbedder(embedder), states) if foreign else ""


def _indistinct(chats: Sequence[Sequence[Message]], reader: StateReader) -> str:
    """Return why turns that differ cannot be told apart by their states; "" if they can."""
    turns = [
        (reader.of_chat(before), reader.of_chat(after))
        for before, after in pairwise(chats)
        if newest_observation(before) not in ("", newest_observation(after))
    ]
    how = "tips are not found and visits not counted by what is new; try memory.state=end, or regex:PATTERN"
    if same := sum(before == after for before, after in turns):
        return f"{same} of {len(turns)} turns have the state of the turn before, though their messages differ: {how}"
    if grown := sum(after.startswith(before) and len(before) > _CHARACTERS for before, after in turns):
        return f"{grown} of {len(turns)} states begin with the whole state before them, as a transcript does: {how}"
    return ""
