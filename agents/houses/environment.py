"""Houses of TextWorld-Express in few words, also in disguise, and a whole house found by walking through it.

MapReader names the coin's room and has a map, which says which rooms adjoin: with both there is little to explore, so
neither is shown.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import replace

from ..text_game.game import State
from ..textworld_express.environment import Environment
from .games import Game, Level
from .house import DIRECTIONS, OPPOSITE, TAKE, Disguise, House, carrying, refused, room_text

FOLD = "train"  # of no consequence: in these games a house follows from its parameters and the seed alone
CARRIED = 50  # MapReader's score with the coin in hand; CoinCollector ends with the coin
PUT = "put coin in box"

_ROOM = re.compile(r"\AYou are in the ([^.]+)\.")
_EXIT = re.compile(r"To the (North|East|South|West) you see the ([^.]+)\.")
_COIN = re.compile(r"\ba coin\b")

Room = tuple[str, Mapping[str, str], bool]  # name, direction -> room behind the door, whether the coin lies there


class HouseEnvironment:
    """A game in a house, in a TextWorld-Express that someone else holds; what shows no room does nothing.

    MapReader's box is in the first room. When the player enters it with the coin, the coin is put into the box without
    a step of the player's.
    """

    def __init__(self, world: Environment, game: Game) -> None:
        self._world, self._game = world, game
        self._room: Room = ("", {}, False)
        self._start = ""
        self._carried = False
        self._disguise: Disguise | None = None
        self.task_description = ""

    def reset(self, level: Level, seed: int, max_steps: int, disguise: int = 0) -> State:
        """Begin an episode in the level's house of this seed, in one of its disguises (see `disguise_of`).

        Raises ValueError where the level has no such house.
        """
        self._carried = False
        self._disguise = disguise_of(walk(self._world, self._game, level, seed), seed, disguise) if disguise else None
        # Two steps are MapReader's alone: to look around after taking the coin, and to put it into the box.
        state = self._world.reset(self._game.name, self._game.params_of(level), FOLD, seed, max_steps + 2)
        state = self._short(state)
        self._start, _, _ = self._room
        self.task_description = self._game.task.format(start=self._start)
        return state

    def step(self, action: str) -> State:
        state = self._world.step(self._meant(action))
        carried = state.score == CARRIED
        if carried and not self._carried:
            state = self._world.step("look around")  # the game's reply shows no room
        elif carried and (read := self._read(state.observation)) and read[0] == self._start:
            state = self._world.step(PUT)
        self._carried = carried
        return self._short(state)

    def _short(self, state: State) -> State:
        """Return a state in few words, without the actions that this form of the game does not have."""
        read = self._read(state.observation)
        self._room = read or self._room
        here = room_text(*self._room)
        here = carrying(self._start, here) if self._carried else here
        there = [f"move {direction}" for direction in DIRECTIONS] + [TAKE]
        actions = tuple(sorted(action for action in there if self._meant(action) in state.valid_actions))
        return replace(state, observation=here if read else refused(here), valid_actions=actions)

    def _read(self, observation: str) -> Room | None:
        read = read_room(observation)
        if read is None or self._disguise is None:
            return read
        room, exits, coin = read
        return self._disguise.names[room], self._disguise.exits(exits), coin

    def _meant(self, action: str) -> str:
        """Return the game's own action for a player's, whose compass may be another."""
        for direction, shown in self._disguise.compass.items() if self._disguise else ():
            if action == f"move {shown}":
                return f"move {direction}"
        return action


def read_room(observation: str) -> Room | None:
    """Return the room that the game's own text shows; None where it shows none."""
    room = _ROOM.match(observation)
    if room is None:
        return None
    exits = {direction.lower(): behind for direction, behind in _EXIT.findall(observation)}
    return room[1], exits, bool(_COIN.search(observation))


def disguise_of(house: House, seed: int, number: int) -> Disguise:
    """Return a house's disguise of this number: its rooms' names exchanged with each other, and the compass turned."""
    return Disguise.drawn(house, sorted(house.doors), random.Random(f"house {seed}, disguise {number}"))


def walk(world: Environment, game: Game, level: Level, seed: int, disguise: int = 0) -> House:
    """Return the level's house of this seed, found by walking through every door, as it is seen in a disguise.

    Raises ValueError where there is none: MapReader may have no rooms so far apart.
    """
    doors: dict[str, Mapping[str, str]] = {}
    coins: list[str] = []

    def visit(observation: str) -> str:
        read = read_room(observation)
        if read is None:
            raise ValueError(f"{game.title}, seed {seed}: no room in {observation!r}")
        room, exits, coin = read
        doors[room] = exits
        if coin:
            coins.append(room)
        for direction, behind in exits.items():
            if behind not in doors:
                visit(world.step(f"move {direction}").observation)
                world.step(f"move {OPPOSITE[direction]}")
        return room

    start = visit(world.reset(game.name, game.params_of(level), FOLD, seed, max_steps=1000).observation)
    (coin,) = coins
    house = House(start, coin, doors)
    return disguise_of(house, seed, disguise).house(house) if disguise else house
