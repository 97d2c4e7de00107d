"""Episodes that a model plays, many at once, in the very chats that agent and gateway make."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from empo2.agents.houses.agent import SYSTEM
from empo2.agents.houses.games import COIN_COLLECTOR
from empo2.agents.houses.house import TAKE, House, refused, room_text
from empo2.recipe.config import Reflection
from empo2.recipe.gateway.episodes.reflector import question
from empo2.recipe.gateway.tips.text import refusal, tip_of
from empo2.recipe.tip_block import render_tips
from empo2.small_model.batch import Chats
from empo2.small_model.notes import Note, Turn, parse

ACTION_TOKENS = 8
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass
class Episode:
    """An episode while it is played, and what came of it."""

    house: House
    chat: list[dict[str, str]]
    room: str
    shown: Sequence[str] = ()
    turns: list[Turn] = field(default_factory=list)
    valid: int = 0
    success: bool = False
    tip: str = ""  # "" where none was asked for or the gateway refuses it
    note: Note | None = None  # what the tip says; None where it has another form

    @property
    def seen(self) -> set[str]:
        return {turn.room for turn in self.turns}

    @property
    def tip_true(self) -> bool:
        """Whether all that the tip says holds in the house, and it claims to have seen no more than was seen."""
        note = self.note
        if note is None or not note.true_of(self.house) or note.found != self.success:
            return False
        if note.nowhere and (note.end, note.nowhere) not in {(turn.room, turn.move) for turn in self.turns}:
            return False
        return {note.end, *(room for room, _ in note.way)} <= self.seen


def play(
    model: Any,
    tokenizer: Any,
    houses: Sequence[House],
    notes: Sequence[Sequence[str]],
    max_steps: int,
    *,
    seed: int,
    temperature: float = 1.0,
    reflection: Reflection | None = None,
) -> list[Episode]:
    """Play one episode in each house at once, with notes before its first turn, and ask for the tip at its end."""
    chats = Chats(model, tokenizer, seed)
    episodes = {}
    for name, (house, shown) in enumerate(zip(houses, notes, strict=True)):
        first = f"{COIN_COLLECTOR.task}\n\n{_text(house, house.start)}"
        first = f"{render_tips(shown)}\n\n{first}" if shown else first
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": first}]
        episodes[name] = Episode(house, chat, house.start, shown)
    for _ in range(max_steps):
        live = {name: episode for name, episode in episodes.items() if not episode.success}
        if not live:
            break
        everyone = {name: episode.chat for name, episode in live.items()}
        for name, reply in chats.reply(everyone, ACTION_TOKENS, temperature).items():
            _act(episodes[name], reply)
    if reflection:
        for episode in episodes.values():
            if not episode.success:
                episode.chat.pop()  # what the last action led to is never shown
            ask = question(reflection, 100 if episode.success else 0, episode.success)
            episode.chat.append(ask)
        asked = {name: episode.chat for name, episode in episodes.items()}
        replies = chats.reply(asked, reflection.max_tokens, reflection.temperature)
        for name, reply in replies.items():
            episode = episodes[name]
            tip = tip_of(reply, SPECIAL_TOKENS, reflection.max_words)
            if not refusal(tip, [episode.chat[-1]["content"], SYSTEM]):
                episode.tip, episode.note = tip, parse(tip)
    return list(episodes.values())


def _act(episode: Episode, reply: str) -> None:
    action = reply.strip().partition("\n")[0].strip()
    exits = episode.house.doors[episode.room]
    turn = Turn(episode.room, exits, action)
    episode.turns.append(turn)
    episode.chat.append({"role": "assistant", "content": reply})
    if action == TAKE and episode.room == episode.house.coin:
        episode.valid += 1
        episode.success = True
        return
    here = turn.exits[turn.move] if turn.move else episode.room
    episode.valid += turn.move is not None
    text = _text(episode.house, here)
    episode.room = here
    episode.chat.append({"role": "user", "content": text if turn.move else refused(text)})


def _text(house: House, room: str) -> str:
    return room_text(room, house.doors[room], room == house.coin)
