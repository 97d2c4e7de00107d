"""Houses of TextWorld-Express in few words, and a whole house found by walking through it."""

import re
from collections.abc import Mapping
from dataclasses import replace

from ..text_game.game import State
from ..textworld_express.environment import Environment
from .house import OPPOSITE, House, refused, room_text

FOLD = "train"  # of no consequence: in these games a house follows from its parameters and the seed alone

_ROOM = re.compile(r"\AYou are in the ([^.]+)\.")
_EXIT = re.compile(r"To the (North|East|South|West) you see the ([^.]+)\.")
_COIN = re.compile(r"\ba coin\b")

Room = tuple[
    str, Mapping[str, str], bool
]  # its name, direction -> the room behind the door, whether the coin lies there


class HouseEnvironment:
    """A game in a house, in a TextWorld-Express that someone else holds; what shows no room does nothing."""

    def __init__(self, world: Environment) -> None:
        self._world = world
        self._room: Room = ("", {}, False)

    def step(self, action: str) -> State:
        return self._short(self._world.step(action))

    def _short(self, state: State) -> State:
        read = read_room(state.observation)
        self._room = read or self._room
        here = self._here()
        return replace(state, observation=here if read else refused(here))

    def _here(self) -> str:
        """Return the text of the room that the player is in."""
        return room_text(*self._room)


def read_room(observation: str) -> Room | None:
    """Return the room that the game's own text shows; None where it shows none."""
    room = _ROOM.match(observation)
    if room is None:
        return None
    exits = {direction.lower(): behind for direction, behind in _EXIT.findall(observation)}
    return room[1], exits, bool(_COIN.search(observation))


def walk_house(world: Environment, game: str, params: str, seed: int) -> House:
    """Return the house of this seed, found by walking through every door.

    Raises ValueError where the parameters have no house of this seed.
    """
    doors: dict[str, Mapping[str, str]] = {}
    coins: list[str] = []

    def visit(observation: str) -> str:
        read = read_room(observation)
        if read is None:
            raise ValueError(f"{game}, seed {seed}: no room in {observation!r}")
        room, exits, coin = read
        doors[room] = exits
        if coin:
            coins.append(room)
        for direction, behind in exits.items():
            if behind not in doors:
                visit(world.step(f"move {direction}").observation)
                world.step(f"move {OPPOSITE[direction]}")
        return room

    start = visit(world.reset(game, params, FOLD, seed, max_steps=1000).observation)
    (coin,) = coins
    return House(start, coin, doors)
