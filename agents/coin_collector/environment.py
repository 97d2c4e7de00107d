"""CoinCollector of TextWorld-Express with its observations shortened to what the task needs."""

import re
from collections.abc import Mapping
from dataclasses import replace

from ..text_game.game import State
from ..textworld_express.environment import Environment
from .house import OPPOSITE, House, refused, room_text

GAME = "coin"
FOLD = "train"  # of no consequence: in this game a house follows from the number of rooms and the seed alone
TASK = "Find the coin and take it."

_ROOM = re.compile(r"\AYou are in the ([^.]+)\.")
_EXIT = re.compile(r"To the (North|East|South|West) you see the ([^.]+)\.")
_COIN = re.compile(r"\ba coin\b")


class CoinEnvironment:
    """CoinCollector without doors to open and without other things, in a TextWorld-Express that someone else holds."""

    task_description = TASK

    def __init__(self, world: Environment) -> None:
        self._world = world
        self._here = ""

    def reset(self, rooms: int, seed: int, max_steps: int) -> State:
        """Begin an episode in the house of this seed. Raises ValueError where no house has so many rooms."""
        params = f"numLocations={rooms},numDistractorItems=0,includeDoors=0"
        return self._short(self._world.reset(GAME, params, FOLD, seed, max_steps))

    def step(self, action: str) -> State:
        return self._short(self._world.step(action))

    def _short(self, state: State) -> State:
        if read := read_room(state.observation):
            self._here = room_text(*read)
            return replace(state, observation=self._here)
        return replace(state, observation=refused(self._here))


def read_room(observation: str) -> tuple[str, Mapping[str, str], bool] | None:
    """Return room, exits and whether the coin lies there, from the game's own text; None where it shows no room."""
    room = _ROOM.match(observation)
    if room is None:
        return None
    exits = {direction.lower(): behind for direction, behind in _EXIT.findall(observation)}
    return room[1], exits, bool(_COIN.search(observation))


def walk(world: Environment, rooms: int, seed: int) -> House:
    """Return the house of this seed, found by walking through every door."""
    params = f"numLocations={rooms},numDistractorItems=0,includeDoors=0"
    doors: dict[str, Mapping[str, str]] = {}
    coins: list[str] = []

    def visit(observation: str) -> str:
        read = read_room(observation)
        if read is None:
            raise ValueError(f"seed {seed}: no room in {observation!r}")
        room, exits, coin = read
        doors[room] = exits
        if coin:
            coins.append(room)
        for direction, behind in exits.items():
            if behind not in doors:
                visit(world.step(f"move {direction}").observation)
                world.step(f"move {OPPOSITE[direction]}")
        return room

    start = visit(world.reset(GAME, params, FOLD, seed, max_steps=10 * rooms).observation)
    (coin,) = coins
    return House(start, coin, doors)
