"""A house as data: its rooms, the doors between them, and where the coin lies."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DIRECTIONS = ("north", "east", "south", "west")
OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
TAKE = "take coin"

Doors = Mapping[str, Mapping[str, str]]  # room -> direction -> the room behind the door


@dataclass(frozen=True)
class House:
    """What a player can find out about a house.

    doors: every room's doors; a door leads both ways, in opposite directions.
    """

    start: str
    coin: str
    doors: Doors

    @property
    def distance(self) -> int:
        """Moves from the start to the coin."""
        return distances(self.doors, self.start)[self.coin]


@dataclass(frozen=True)
class Disguise:
    """Other names for the rooms of a house, each by its own, and other directions: the compass turned or mirrored."""

    names: Mapping[str, str]
    compass: Mapping[str, str]

    @classmethod
    def drawn(cls, house: House, names: Sequence[str], generator: random.Random) -> "Disguise":
        """Draw the rooms' names, no two alike, and one of the eight compasses in which a way back is still opposite."""
        rooms = sorted(house.doors)
        called = dict(zip(rooms, generator.sample(names, len(rooms)), strict=True))
        turn, mirror = generator.randrange(4), generator.choice((1, -1))
        return cls(called, {name: DIRECTIONS[(mirror * index + turn) % 4] for index, name in enumerate(DIRECTIONS)})

    def exits(self, exits: Mapping[str, str]) -> dict[str, str]:
        """Return a room's doors as a player is to see them."""
        return {self.compass[direction]: self.names[behind] for direction, behind in exits.items()}

    def house(self, house: House) -> House:
        """Return the house as a player is to see it."""
        doors = {self.names[room]: self.exits(exits) for room, exits in house.doors.items()}
        return House(self.names[house.start], self.names[house.coin], doors)


def disguise_of(house: House, seed: int, number: int) -> Disguise:
    """Return a house's disguise of this number: its rooms' names exchanged with each other, and the compass turned."""
    return Disguise.drawn(house, sorted(house.doors), random.Random(f"house {seed}, disguise {number}"))


def in_disguise(house: House, seed: int, number: int) -> House:
    """Return a house as it is seen in its disguise of this number; 0: as the game made it."""
    return disguise_of(house, seed, number).house(house) if number else house


def distances(doors: Doors, start: str) -> dict[str, int]:
    """Return the moves from `start` to every room that can be reached over known doors, nearest first."""
    found = {start: 0}
    queue = [start]
    for room in queue:
        for behind in doors.get(room, {}).values():
            if behind not in found:
                found[behind] = found[room] + 1
                queue.append(behind)
    return found


def room_text(room: str, exits: Mapping[str, str], coin: bool) -> str:
    """Return what the player reads in a room: "You are in the den. You see a coin. South: cellar. West: balcony."."""
    parts = [f"You are in the {room}."]
    if coin:
        parts.append("You see a coin.")
    parts += [f"{direction.capitalize()}: {exits[direction]}." for direction in DIRECTIONS if direction in exits]
    return " ".join(parts)


def refused(here: str) -> str:
    """Return what the player reads after an action that the world does not know; `here` is the room's text."""
    return f"That does nothing. {here}"


def carrying(start: str, here: str) -> str:
    """Return what the player reads with MapReader's coin in hand; `here` is the room's text."""
    return f"Bring it to the {start}. {here}"
