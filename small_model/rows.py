"""Training rows from scripted play: a whole chat, with notes where the gateway puts them, and what of it is learned."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from empo2.agents.houses.agent import SYSTEM
from empo2.agents.houses.games import COIN_COLLECTOR
from empo2.agents.houses.house import TAKE, House, refused, room_text
from empo2.recipe.config import Reflection
from empo2.recipe.gateway.episodes.reflector import question
from empo2.recipe.tip_block import render_tips
from empo2.small_model.notes import WORDINGS, Note, Turn, falsified, note_of, render, way_to
from empo2.small_model.player import Player, slip

SLIPS = (0.0, 0.0, 0.1, 0.25)  # how often a player does something without sense, drawn per episode
MAX_NOTES = 10


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    learned: bool = False  # a reply that the model is trained on


@dataclass(frozen=True)
class Row:
    """One chat to learn from.

    notes: as shown, with whether they are true of the house.
    note: the one that the chat ends with; None where it was not asked for.
    """

    kind: str
    house: House
    notes: tuple[tuple[Note, bool], ...]
    success: bool
    note: Note | None
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Played:
    turns: tuple[Turn, ...]
    sensible: tuple[bool, ...]
    success: bool


def play(
    house: House,
    notes: Sequence[Note],
    max_steps: int,
    slips: float,
    generator: random.Random,
    ignores: float = 0.0,
) -> Played:
    """Play an episode by script; some actions, as often as `slips` says, are without sense. ignores: of `Player`."""
    player, room, turns, sensible = Player(notes, generator, ignores), house.start, [], []
    for _ in range(max_steps):
        exits, coin = house.doors[room], room == house.coin
        best = player.act(room, exits, coin)
        sensible.append(coin or generator.random() >= slips)  # a coin that is seen is taken, so no note is wrong
        turns.append(Turn(room, exits, best if sensible[-1] else slip(exits, generator)))
        if coin and turns[-1].action == TAKE:
            return Played(tuple(turns), tuple(sensible), True)
        room = exits[turns[-1].move] if turns[-1].move else room
    return Played(tuple(turns), tuple(sensible), False)


@dataclass(frozen=True, eq=False)
class Mix:
    """What the rows of a stage of training are made of.

    kinds: what notes a row shows, and how many rows in a hundred do.
    after_success, after_failure: how often the row ends with a note to be written.
    """

    kinds: Mapping[str, int]
    after_success: float
    after_failure: float


# "success": true notes, one of them or more says where the coin is; "failure": true, none says it.
READING = Mix(
    {"none": 20, "success": 32, "failure": 32, "other house": 6, "false": 5, "mixed": 5},
    after_success=0.3,
    after_failure=0.7,
)
# A player who read the way in a note can copy it; one who found the coin without notes must remember it.
WRITING = Mix(
    {"none": 60, "success": 15, "failure": 15, "other house": 4, "false": 3, "mixed": 3},
    after_success=0.9,
    after_failure=0.9,
)


def rows(
    houses: Sequence[House], count: int, mix: Mix, reflections: Sequence[Reflection], generator: random.Random
) -> list[Row]:
    """Return `count` rows; `houses` are played in turn, in disguise (see houses.disguised)."""
    drawn = (
        row(houses[index % len(houses)], houses[(7 * index + 3) % len(houses)], mix, reflections, generator)
        for index in itertools.count()
    )
    # A short episode may be without sense throughout.
    return list(itertools.islice((row for row in drawn if any(message.learned for message in row.messages)), count))


def row(house: House, other: House, mix: Mix, reflections: Sequence[Reflection], generator: random.Random) -> Row:
    """Return one row.

    Args:
        other: the house that notes of the kind "other house" are about.
        reflections: ways to ask for the note.
    """
    (kind,) = generator.choices(list(mix.kinds), list(mix.kinds.values()))
    limit = house.distance + 1 + generator.choice((0, 0, 1, 1, 2, 3, 4))
    if kind == "none" and generator.random() < 0.5:
        limit = generator.randint(5, 9)
    limit = min(max(limit, 2), 10)
    notes = _notes(kind, house, other, limit, generator)
    played = play(house, notes, limit, generator.choice(SLIPS), generator)
    shown = [(note, note.true_of(house)) for note in notes]
    messages = chat(played, _blocks(notes, len(played.turns), generator))
    note = None
    if generator.random() < (mix.after_success if played.success else mix.after_failure):
        note = note_of(played.turns, played.success)
        messages += asked_for(note, played.success, reflections, generator)
    return Row(kind, house, tuple(shown), played.success, note, tuple(messages))


def asked_for(note: Note, success: bool, reflections: Sequence[Reflection], generator: random.Random) -> list[Message]:
    """Return the question after an episode, the first of the reflections three times in five, and the note to write."""
    asked = reflections[0] if generator.random() < 0.6 else generator.choice(list(reflections))
    ask = question(asked, 100 if success else 0, success)
    return [Message("user", ask["content"]), Message("assistant", render(note), learned=True)]


def _notes(kind: str, house: House, other: House, limit: int, generator: random.Random) -> list[Note]:
    count = generator.choice((1, 1, 2, 2, 3, 4, 5, 6, 8, MAX_NOTES))
    if kind == "none":
        return []
    if kind == "other house":
        # As in TextWorld-Express, every house begins in the same room, so the first words of a way may fit.
        other = beginning_as(house, other)
        return [_earlier(other, limit, generator.random() < 0.6, generator) for _ in range(min(count, 4))]
    if kind == "success":
        successes = max(1, round(count * generator.random()))
        return _shuffled([_earlier(house, limit, at < successes, generator) for at in range(count)], generator)
    if kind == "failure":
        return _shuffled(_failures(house, count, limit, generator), generator)
    wrong = [
        falsified(_earlier(house, limit, generator.random() < 0.6, generator), house, generator)
        for _ in range(1 if kind == "false" else generator.choice((1, 2)))
    ]
    if kind == "false":
        right = _failures(house, generator.choice((0, 0, 1, 2)), limit, generator)
        return _shuffled([*wrong, *right], generator)
    right = [_earlier(house, limit, at == 0, generator) for at in range(max(count - len(wrong), 2))]
    strange = [_earlier(beginning_as(house, other), limit, True, generator)] if generator.random() < 0.5 else []
    return _shuffled([*wrong, *right, *strange], generator)[:MAX_NOTES]


def _earlier(house: House, limit: int, success: bool, generator: random.Random) -> Note:
    """Return the true note of an earlier episode that ended like this."""
    if success:
        played = play(house, [], 12, generator.choice(SLIPS), generator)
        if played.success and generator.random() < 0.5:
            return note_of(played.turns, True)
        return Note(house.coin, way_to(house.doors, house.start, house.coin), found=True)
    return next(iter(_failures(house, 1, limit, generator)), Note(house.start))


def _failures(house: House, count: int, limit: int, generator: random.Random) -> list[Note]:
    """Return true notes of failures, of players who knew some of the notes before theirs."""
    notes: list[Note] = []
    for _ in range(3 * count):
        if len(notes) == count:
            break
        known = generator.sample(notes, generator.randint(0, len(notes)))
        # An episode that comes to the coin is cut before it.
        played = play(house, known, min(limit, 8), generator.choice(SLIPS), generator)
        cut = next((at for at, turn in enumerate(played.turns) if turn.room == house.coin), len(played.turns))
        if turns := list(played.turns[:cut]):
            notes.append(note_of(turns, False))
    return notes


def beginning_as(house: House, other: House) -> House:
    """Return `other` with its first room, wherever it is named, called as the house's first."""
    names = {room: room for room in other.doors} | {other.start: house.start}
    if house.start in other.doors and house.start != other.start:
        names[house.start] = other.start
    return House(
        names[other.start],
        names[other.coin],
        {names[room]: {way: names[behind] for way, behind in doors.items()} for room, doors in other.doors.items()},
    )


def _shuffled(notes: list[Note], generator: random.Random) -> list[Note]:
    return generator.sample(notes, len(notes))


def _blocks(notes: Sequence[Note], turns: int, generator: random.Random) -> dict[int, str]:
    """The block of notes that each turn is shown: mostly all before the first, else some before a later one."""
    later = generator.randrange(1, turns) if turns > 1 and generator.random() < 0.2 else 0
    texts: dict[int, list[str]] = {}
    for note in notes:
        wording = 0 if generator.random() < 0.7 else generator.randrange(WORDINGS)
        texts.setdefault(later if generator.random() < 0.5 else 0, []).append(render(note, wording))
    return {turn: render_tips(list(dict.fromkeys(lines))) for turn, lines in texts.items()}


def chat(played: Played, blocks: Mapping[int, str]) -> list[Message]:
    """Return an episode as agent and gateway make it, with a block of notes before some turns."""
    messages = [Message("system", SYSTEM)]
    moved = True
    for index, (turn, sensible) in enumerate(zip(played.turns, played.sensible, strict=True)):
        here = room_text(turn.room, turn.exits, coin=turn.action == TAKE)
        text = here if moved else refused(here)
        text = text if index else f"{COIN_COLLECTOR.task}\n\n{text}"
        text = f"{blocks[index]}\n\n{text}" if index in blocks else text
        messages += [Message("user", text), Message("assistant", turn.action, learned=sensible)]
        moved = turn.move is not None
    return messages
