"""A note about a house: what it says, in which words, whether it is true, and how one is read back from text."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from empo2.agents.houses.house import Doors, House

Move = tuple[str, str]  # a room and the direction in which it is left

COIN, NO_COIN = "Coin in ", "No coin as far as "  # how notes in the first wording begin


@dataclass(frozen=True)
class Note:
    """What one episode says to the next: a way from the start, without detours, and whether the coin lies at its end.

    A note of a failure says how far a player came. It names what to do, not what to leave: a small model copies an
    action out of a note, and hardly learns to avoid what a note names.

    end: the room to which the way leads.
    way: a room and a direction at a time; empty where the way ends at the start.
    found: whether the coin was there; else it was nowhere on the way.
    nowhere: the direction of a door of `end` behind which there is nothing, and no other door; "" where none is told.
    """

    end: str
    way: tuple[Move, ...] = ()
    found: bool = False
    nowhere: str = ""

    def edges(self) -> list[tuple[str, str, str]]:
        """What the way says about the house: a room, a direction, and the room behind."""
        rooms = [*(room for room, _ in self.way), self.end]
        return [(room, direction, rooms[index + 1]) for index, (room, direction) in enumerate(self.way)]

    def true_of(self, house: House) -> bool:
        """Whether all of it holds in the house; the way must begin at the start."""
        rooms = [*(room for room, _ in self.way), self.end]
        if rooms[0] != house.start:
            return False
        if any(house.doors.get(room, {}).get(direction) != behind for room, direction, behind in self.edges()):
            return False
        if self.nowhere:
            behind = house.doors[self.end].get(self.nowhere, house.coin)
            if behind == house.coin or len(house.doors[behind]) > 1:
                return False
        return self.end == house.coin if self.found else house.coin not in rooms


def render(note: Note, wording: int = 0) -> str:
    """Return the note in one of WORDINGS; the small model writes the first and reads all."""
    way = [f"{room} move {direction}" for room, direction in note.way]
    return _WORDINGS[wording](note.end, way, note.found, f"not {note.nowhere}" if note.nowhere else "no coin")


def _plain(end: str, way: list[str], found: bool, last: str) -> str:
    if found:
        return f"{COIN}the {end}: {', '.join([*way, f'{end} take coin'])}."
    return f"{NO_COIN}the {end}: {', '.join([*way, f'{end} {last}'])}."


def _go(end: str, way: list[str], found: bool, last: str) -> str:
    if found:
        return f"The coin is in the {end}; go {', '.join([*way, f'{end} take coin'])}."
    if last != "no coin":
        return f"The way on is {', '.join([*way, f'{end} {last}'])}."
    return f"The way on is {', '.join([*way, end])}; no coin there." if way else f"There is no coin in the {end}."


def _from(end: str, way: list[str], found: bool, last: str) -> str:
    steps = [f"in the {step}" for step in way]
    if found:
        return f"I found the coin: {', '.join([*steps, f'in the {end} take coin'])}."
    return f"I came this far: {', '.join([*steps, f'in the {end} {last}'])}."


_WORDINGS = (_plain, _go, _from)
WORDINGS = len(_WORDINGS)

_STEP = re.compile(r"\A(.+) move (north|east|south|west)\Z")
_FOUND_TEXT = re.compile(r"\ACoin in the ([^:;,]+): (?:(.+), )?([^:;,]+) take coin\.?\Z")
_FAILED_TEXT = re.compile(
    r"\ANo coin as far as the ([^:;,]+): (?:(.+), )?([^:;,]+) (?:no coin|not (north|east|south|west))\.?\Z"
)


def parse(text: str) -> Note | None:
    """Return what a note in the first wording says; None for any other text."""
    found = _FOUND_TEXT.match(text)
    match = found or _FAILED_TEXT.match(text)
    way = _way(match[2]) if match and match[1] == match[3] else None
    if match is None or way is None:
        return None
    return Note(match[1], way, True) if found else Note(match[1], way, nowhere=match[4] or "")


def _way(text: str | None) -> tuple[Move, ...] | None:
    steps = [_STEP.match(step) for step in text.split(", ")] if text else []
    return tuple((step[1], step[2]) for step in steps if step) if all(steps) else None


@dataclass(frozen=True)
class Turn:
    """What a player saw in one turn, and did."""

    room: str
    exits: Mapping[str, str]
    action: str

    @property
    def move(self) -> str | None:
        """The direction of a move through a door that is there; None for every other action."""
        verb, _, direction = self.action.partition(" ")
        return direction if verb == "move" and direction in self.exits else None


def note_of(turns: Sequence[Turn], success: bool) -> Note:
    """Return the note on an episode, true by what was seen in it: the way to the last room that was seen."""
    moves = [(turn.room, turn.move) for turn in turns if turn.move]
    return Note(turns[-1].room, shortened(moves, turns[-1].room), success)


def frontier_of(turns: Sequence[Turn], success: bool) -> Note:
    """Return the note on an episode that tells the next one where to go on.

    After a success that is the way; after a failure the way to the last room from which a door led nowhere, and that
    door; where none did, the way to the last room that was seen.
    """
    for at in range(len(turns) - 1, 0, -1):
        before, here = turns[at - 1], turns[at]
        if not success and before.move and len(here.exits) == 1 and len(before.exits) > 1:
            moves = [(turn.room, turn.move) for turn in turns[: at - 1] if turn.move]
            return Note(before.room, shortened(moves, before.room), nowhere=before.move)
    return note_of(turns, success)


def shortened(moves: Sequence[Move], goal: str) -> tuple[Move, ...]:
    """Return the moves up to the first arrival in the goal, without loops."""
    way: dict[str, str] = {}
    for room, direction in moves:
        while room in way:
            way.popitem()
        if room == goal:
            break
        way[room] = direction
    return tuple(way.items())


def falsified(note: Note, house: House, generator: random.Random) -> Note:
    """Return the note with one thing wrong: a turned step, or a coin where none is; a failure at the coin's room."""
    if note.way and generator.random() < 0.5:
        at = generator.randrange(len(note.way))
        room, direction = note.way[at]
        wrong = generator.choice([other for other in ("north", "east", "south", "west") if other != direction])
        return replace(note, way=(*note.way[:at], (room, wrong), *note.way[at + 1 :]))
    end = generator.choice(sorted(set(house.doors) - {house.coin})) if note.found else house.coin
    return replace(note, end=end, way=way_to(house.doors, house.start, end))


def way_to(doors: Doors, start: str, goal: str) -> tuple[Move, ...]:
    """Return a shortest way over known doors. Raises ValueError where there is none."""
    back: dict[str, Move] = {}
    queue = [start]
    for room in queue:
        for direction, behind in doors.get(room, {}).items():
            if behind not in back and behind != start:
                back[behind] = (room, direction)
                queue.append(behind)
    way: list[Move] = []
    while goal != start:
        if goal not in back:
            raise ValueError(f"no way from {start} to {goal}")
        way.append(back[goal])
        goal = back[goal][0]
    return tuple(reversed(way))
