"""The games in houses: what their players are to do, their levels, and the houses of each level."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .deep import DOORS, deep_house
from .house import House, in_disguise

DEEP_HOUSES = {"train": range(160), "unseen": range(160, 200)}  # seeds, of every deep level
HOUSES = Path(__file__).with_name("houses.json")  # game -> level -> "train" and "unseen" -> seed -> house


@dataclass(frozen=True)
class Level:
    """What the houses of a level have in common.

    rooms: of a house. distances: moves from the start to the coin. max_steps: actions of an episode.
    chance: how often a scripted explorer, which does not know the house, succeeds, from and to. It depends on
    the doors that lead elsewhere more than on the distance. deep: whether its houses are made here (deep.py), with as
    many junctions as moves; the others are the game's own.
    """

    rooms: int
    distances: tuple[int, ...]
    max_steps: int
    chance: tuple[float, float]
    deep: bool = False

    @classmethod
    def of_junctions(cls, count: int) -> "Level":
        """Return a level of deep houses; after the moves the last step takes the coin."""
        return cls(1 + DOORS * count, distances=(count,), max_steps=count + 1, chance=(0.0, 0.02), deep=True)

    def made(self, seed: int) -> House:
        """Return the deep house of a seed."""
        return deep_house(seed, *self.distances)


@dataclass(frozen=True, eq=False)
class Game:
    """A game of TextWorld-Express, played without doors to open and without things other than the coin.

    name: in TextWorld-Express. title: for people. task: what a player reads, with `{start}` for the first room.
    brought_back: whether the coin must be brought to the first room.
    params: of TextWorld-Express, with `{rooms}` and `{distance}`, the most moves from the start to the coin.
    """

    name: str
    title: str
    task: str
    brought_back: bool
    params: str
    levels: Mapping[str, Level]

    def params_of(self, level: Level) -> str:
        """Return TextWorld-Express's parameters for the houses of a level."""
        return self.params.format(rooms=level.rooms, distance=max(level.distances))

    def houses(self, level: str) -> dict[str, dict[int, House]]:
        """Return a level's houses by seed: "train" and "unseen", none of which made the small model."""
        if (deep := self.levels[level]).deep:
            return {part: {seed: deep.made(seed) for seed in seeds} for part, seeds in DEEP_HOUSES.items()}
        parts = _houses()[self.name][level]
        return {part: {int(seed): House(**house) for seed, house in found.items()} for part, found in parts.items()}

    def panel(self, level: str) -> dict[str, list[int]]:
        """Return the seeds of a level's houses."""
        if self.levels[level].deep:
            return {part: [*seeds] for part, seeds in DEEP_HOUSES.items()}
        return {part: [*map(int, found)] for part, found in _houses()[self.name][level].items()}

    def house(self, level: str, seed: int, disguise: int = 0) -> House:
        """Return a level's house of this seed, as it is seen in a disguise. Raises ValueError if there is none."""
        for part in self.houses(level).values():
            if house := part.get(seed):
                return in_disguise(house, seed, disguise)
        raise ValueError(f"seed {seed}: level {level!r} of {self.title} has no such house; see games.py")


@cache
def _houses() -> dict[str, dict[str, dict[str, dict[str, dict]]]]:
    return json.loads(HOUSES.read_text())


COIN_COLLECTOR = Game(
    name="coin",
    title="CoinCollector",
    task="Find the coin and take it.",
    brought_back=False,
    params="numLocations={rooms},numDistractorItems=0,includeDoors=0",
    levels={
        "easy": Level(rooms=11, distances=(2, 3), max_steps=7, chance=(0.35, 0.65)),
        "medium": Level(rooms=11, distances=(4,), max_steps=6, chance=(0.08, 0.15)),
        "hard": Level(rooms=11, distances=(4,), max_steps=6, chance=(0.0, 0.04)),
        **{f"deep-{count}": Level.of_junctions(count) for count in (6, 7, 8)},
    },
)
MAP_READER = Game(
    name="mapreader",
    title="MapReader",
    task="Find the coin, take it and bring it to the {start}.",
    brought_back=True,
    params="numLocations={rooms},maxDistanceApart={distance},maxDistractorItemsPerLocation=0,includeDoors=0",
    levels={
        "easy": Level(rooms=11, distances=(1, 2), max_steps=8, chance=(0.5, 0.95)),
        "medium": Level(rooms=11, distances=(3,), max_steps=7, chance=(0.08, 0.2)),
        "hard": Level(rooms=20, distances=(5,), max_steps=11, chance=(0.0, 0.03)),
    },
)
GAMES = {game.name: game for game in (COIN_COLLECTOR, MAP_READER)}
