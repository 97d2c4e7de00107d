"""Training rows of deep houses: notes of failures, several at once, some misleading, read where the player stands.

A note is shown as the gateway shows it: in a room that its episode was in, at most TOP new ones a turn. The player
knows what it was shown by then, and nothing else.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from empo2.agents.houses.deep import deep_house
from empo2.agents.houses.house import TAKE, Disguise, House
from empo2.recipe.config import Reflection
from empo2.recipe.tip_block import render_tips
from empo2.small_model.houses import MAKE_SEEDS, NAMES
from empo2.small_model.notes import WORDINGS, Note, Turn, falsified, frontier_of, render, way_to
from empo2.small_model.player import Player, slip
from empo2.small_model.rows import Message, Played, Row, asked_for, beginning_as, chat, play

TOP = 3  # notes that a turn shows, as in coin.yaml
IGNORES = (0.0, 0.1, 0.3)  # of the players who wrote the notes


@dataclass(frozen=True, eq=False)
class Mix:
    """What the rows of a stage of training are made of.

    kinds: of `known`, each with its rows in a hundred.
    written: share of rows that end with a note to be written.
    junctions: of the houses; one is drawn for each row.
    slips: how often a player does something without sense, drawn per row.
    """

    kinds: Mapping[str, int]
    written: float
    junctions: Sequence[int]
    slips: Sequence[float]


READING = Mix(
    {"none": 15, "failure": 50, "success": 12, "mixed": 15, "other house": 8},
    written=0.6,
    junctions=(2, 3, 4, 5, 6, 7, 8),
    slips=(0.0, 0.0, 0.0, 0.1),
)
# The longer and the less sensible an episode is, the harder is it to say which of its doors led nowhere.
WRITING = Mix(
    {"none": 40, "failure": 35, "success": 10, "mixed": 10, "other house": 5},
    written=1.0,
    junctions=(4, 5, 6, 7, 7, 8),
    slips=(0.0, 0.0, 0.1, 0.25),
)


@dataclass(frozen=True)
class Earlier:
    """The note of an earlier episode, and the rooms that it was in."""

    note: Note
    rooms: frozenset[str]


def rows(count: int, mix: Mix, reflections: Sequence[Reflection], generator: random.Random) -> list[Row]:
    """Return `count` rows, each of a house of its own, with other names and a turned compass."""
    return [row(mix, reflections, generator) for _ in range(count)]


def row(mix: Mix, reflections: Sequence[Reflection], generator: random.Random) -> Row:
    """Return one row."""
    (kind,) = generator.choices(list(mix.kinds), list(mix.kinds.values()))
    junctions = generator.choice(mix.junctions)
    house, other = (_house(junctions, generator) for _ in range(2))
    earlier = known(kind, house, other, generator)
    played, heard = played_with(house, earlier, junctions + 1, generator.choice(mix.slips), generator)
    blocks = {turn: render_tips([_worded(each.note, generator) for each in new]) for turn, new in heard.items()}
    messages: list[Message] = chat(played, blocks)
    note = None
    if generator.random() < mix.written:
        note = frontier_of(played.turns, played.success)
        messages += asked_for(note, played.success, reflections, generator)
    shown = [(each.note, each.note.true_of(house)) for new in heard.values() for each in new]
    return Row(kind, house, tuple(shown), played.success, note, tuple(messages))


def known(kind: str, house: House, other: House, generator: random.Random) -> list[Earlier]:
    """Return what is in the memory of a house.

    Args:
        kind: "none"; "failure": true notes of failures; "success": one of them, at least, says where the coin is;
            "mixed": some of them false.
        other: the house that notes of the kind "other house" are about.
    """
    if kind == "none":
        return []
    if kind == "other house":
        return _failures(beginning_as(house, other), generator)
    earlier = _failures(house, generator)
    if kind == "success":
        way = way_to(house.doors, house.start, house.coin)
        found = Note(house.coin, way, found=True)
        earlier.append(Earlier(found, frozenset({house.coin, *(room for room, _ in way)})))
    if kind == "mixed":
        wrong = set(generator.sample(range(len(earlier)), generator.randint(1, max(1, len(earlier) // 2))))
        earlier = [
            replace(each, note=misleading(each.note, house, generator)) if number in wrong else each
            for number, each in enumerate(earlier)
        ]
    return earlier


def misleading(note: Note, house: House, generator: random.Random) -> Note:
    """Return the note with one thing wrong: mostly, that the right door leads nowhere."""
    right = dict(way_to(house.doors, house.start, house.coin))
    if note.nowhere and generator.random() < 0.7:
        return replace(note, nowhere=right[note.end])
    return falsified(replace(note, nowhere=""), house, generator)


def played_with(
    house: House, earlier: Sequence[Earlier], max_steps: int, slips: float, generator: random.Random
) -> tuple[Played, dict[int, list[Earlier]]]:
    """Play an episode by script; return it, and which notes were shown before which turn."""
    player, room, turns, sensible = Player([], generator), house.start, list[Turn](), list[bool]()
    left, heard = [*earlier], dict[int, list[Earlier]]()
    for number in range(max_steps):
        here = [each for each in left if room in each.rooms]
        if new := generator.sample(here, min(TOP, len(here))):
            heard[number] = new
            left = [each for each in left if each not in new]
            player.hear([each.note for each in new])
        exits, coin = house.doors[room], room == house.coin
        best = player.act(room, exits, coin)
        sensible.append(coin or generator.random() >= slips)
        turns.append(Turn(room, exits, best if sensible[-1] else slip(exits, generator)))
        if turns[-1].action == TAKE:
            return Played(tuple(turns), tuple(sensible), True), heard
        room = exits[turns[-1].move] if turns[-1].move else room
    return Played(tuple(turns), tuple(sensible), False), heard


def told(turns: Sequence[Turn], heard: Mapping[int, Sequence[Earlier]]) -> list[tuple[int, bool]]:
    """Return the turns at which notes say which door to take or to leave, and whether the player did as they say.

    Only first visits of a room count, and only notes that were shown by then.
    """
    notes, seen, found = list[Note](), set[str](), list[tuple[int, bool]]()
    for number, turn in enumerate(turns):
        notes += [each.note for each in heard.get(number, ())]
        if turn.room not in seen:
            on = {direction for note in notes for room, direction in note.way if room == turn.room}
            nowhere = {note.nowhere for note in notes if note.nowhere and note.end == turn.room}
            if on or nowhere:
                found.append((number, turn.move in on if on else turn.move is not None and turn.move not in nowhere))
        seen.add(turn.room)
    return found


def _house(junctions: int, generator: random.Random) -> House:
    house = deep_house(generator.choice(MAKE_SEEDS), junctions)
    return Disguise.drawn(house, NAMES, generator).house(house)


def _failures(house: House, generator: random.Random) -> list[Earlier]:
    """Return true notes of failures, at least one, of players who knew some of the notes before theirs."""
    earlier: dict[Note, frozenset[str]] = {}
    episodes = generator.choice((1, 1, 2, 3, 4, 6, 8, 12))
    while episodes > 0 or not earlier:
        episodes -= 1
        notes = generator.sample(list(earlier), generator.randint(0, len(earlier)))
        played = play(house, notes, house.distance + 1, 0.0, generator, generator.choice(IGNORES))
        if not played.success:
            earlier[frontier_of(played.turns, success=False)] = frozenset(turn.room for turn in played.turns)
    return [Earlier(note, rooms) for note, rooms in earlier.items()]


def _worded(note: Note, generator: random.Random) -> str:
    return render(note, 0 if generator.random() < 0.7 else generator.randrange(WORDINGS))
