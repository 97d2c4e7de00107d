"""A note about a house: what it says, in which words, whether it is true, and how one is read back from text."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from empo2.agents.coin_collector.house import Doors, House

Move = tuple[str, str]  # a room and the direction in which it is left


@dataclass(frozen=True)
class Note:
    """What one episode says to the next.

    coin: the room of the coin; "" where it was not found.
    way: from the start to the coin, a room and a direction at a time; empty where the coin is in the first room.
    empty: rooms in which there was no coin, in the order in which they were seen; only where it was not found.
    dead_ends: those of them that have one door alone. Without them a list of rooms is of little use: the way to the
        coin leads through rooms that earlier players saw, and only what branches off it is to be avoided.
    """

    coin: str = ""
    way: tuple[Move, ...] = ()
    empty: tuple[str, ...] = ()
    dead_ends: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return bool(self.coin)

    def edges(self) -> list[tuple[str, str, str]]:
        """What the way says about the house: a room, a direction, and the room behind."""
        rooms = [*(room for room, _ in self.way), self.coin]
        return [(room, direction, rooms[index + 1]) for index, (room, direction) in enumerate(self.way)]

    def true_of(self, house: House) -> bool:
        """Whether all of it holds in the house; a way must begin at the start."""
        if any(house.doors.get(room, {}).get(direction) != behind for room, direction, behind in self.edges()):
            return False
        if self.way and self.way[0][0] != house.start:
            return False
        if house.coin in self.empty or not set(self.empty) <= set(house.doors):
            return False
        if any(len(house.doors[room]) > 1 for room in self.dead_ends):
            return False
        return not self.found or (self.coin == house.coin and (bool(self.way) or house.start == house.coin))


DEAD_END = " (dead end)"


def render(note: Note, wording: int = 0) -> str:
    """Return the note in one of WORDINGS; the small model writes the first and reads all."""
    if note.found:
        return _FOUND[wording](note.coin, [f"{room} move {direction}" for room, direction in note.way])
    return _EMPTY[wording]([f"{room}{DEAD_END if room in note.dead_ends else ''}" for room in note.empty])


def _found(coin: str, way: list[str]) -> str:
    return f"Coin in the {coin}: {', '.join([*way, f'{coin} take coin'])}."


def _found_go(coin: str, way: list[str]) -> str:
    return f"The coin is in the {coin}; go {', '.join([*way, f'{coin} take coin'])}."


def _found_from(coin: str, way: list[str]) -> str:
    steps = [f"in the {step}" for step in [*way, f"{coin} take coin"]]
    return f"I found the coin: {', '.join(steps)}."


def _empty(rooms: Sequence[str]) -> str:
    return f"Empty: {', '.join(rooms)}."


def _empty_no_coin(rooms: Sequence[str]) -> str:
    return f"No coin in {', '.join(rooms)}."


def _empty_saw(rooms: Sequence[str]) -> str:
    listed = " or the ".join([", the ".join(rooms[:-1]), rooms[-1]] if len(rooms) > 1 else rooms)
    return f"There was no coin in the {listed}."


_FOUND = (_found, _found_go, _found_from)
_EMPTY = (_empty, _empty_no_coin, _empty_saw)
WORDINGS = len(_FOUND)

_STEP = re.compile(r"\A(.+) move (north|east|south|west)\Z")
_FOUND_TEXT = re.compile(r"\ACoin in the ([^:;,]+): (?:(.+), )?([^:;,]+) take coin\.?\Z")
_EMPTY_TEXT = re.compile(r"\AEmpty: ([^:;.]+)\.?\Z")


def parse(text: str) -> Note | None:
    """Return what a note in the first wording says; None for any other text."""
    if match := _FOUND_TEXT.match(text):
        way = _way(match[2])
        return None if way is None or match[1] != match[3] else Note(match[1], way)
    if match := _EMPTY_TEXT.match(text):
        rooms = match[1].split(", ")
        dead_ends = [room.removesuffix(DEAD_END) for room in rooms if room.endswith(DEAD_END)]
        return Note(empty=tuple(room.removesuffix(DEAD_END) for room in rooms), dead_ends=tuple(dead_ends))
    return None


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
        direction = self.action.removeprefix("move ")
        return direction if direction in self.exits else None


def note_of(turns: Sequence[Turn], success: bool) -> Note:
    """Return the note on an episode, true by what was seen in it."""
    if not success:
        exits = {turn.room: turn.exits for turn in turns}
        return Note(empty=tuple(exits), dead_ends=tuple(room for room in exits if len(exits[room]) == 1))
    moves = [(turn.room, turn.move) for turn in turns if turn.move]
    return Note(turns[-1].room, shortened(moves, turns[-1].room))


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
    """Return the note with one thing wrong: a coin where none is, the coin's room as empty, or a turned step."""
    others = sorted(set(house.doors) - {house.coin})
    if not note.found:
        empty = (*note.empty[1:], house.coin)
        dead_ends = tuple(room for room in note.dead_ends if room in empty)
        return replace(note, empty=empty, dead_ends=dead_ends) if note.empty else note
    if note.way and generator.random() < 0.5:
        at = generator.randrange(len(note.way))
        room, direction = note.way[at]
        wrong = generator.choice([other for other in ("north", "east", "south", "west") if other != direction])
        return replace(note, way=(*note.way[:at], (room, wrong), *note.way[at + 1 :]))
    coin = generator.choice(others)
    return replace(note, coin=coin, way=way_to(house.doors, house.start, coin))


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
