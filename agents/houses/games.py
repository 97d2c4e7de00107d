"""The games in houses: what their players are to do, their levels, and the houses of each level."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PANELS = Path(__file__).with_name("panels.json")  # game -> level -> "train" and "unseen" -> seeds


@dataclass(frozen=True)
class Level:
    """What the houses of a level have in common.

    rooms: of a house. distances: moves from the start to the coin. max_steps: actions of an episode.
    chance: how often a scripted explorer, which does not know the house, succeeds, from and to. It depends on
    the doors that lead elsewhere more than on the distance.
    """

    rooms: int
    distances: tuple[int, ...]
    max_steps: int
    chance: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Game:
    """A game of TextWorld-Express, played without doors to open and without things other than the coin.

    name: in TextWorld-Express. title: for people. task: what a player reads, with `{start}` for the first room.
    params: of TextWorld-Express, with `{rooms}` and `{distance}`, the most moves from the start to the coin.
    """

    name: str
    title: str
    task: str
    params: str
    levels: Mapping[str, Level]

    def params_of(self, level: Level) -> str:
        """Return TextWorld-Express's parameters for the houses of a level."""
        return self.params.format(rooms=level.rooms, distance=max(level.distances))

    def panel(self, level: str) -> dict[str, list[int]]:
        """Return the seeds of a level's houses: "train" and "unseen", none of which made the small model."""
        return json.loads(PANELS.read_text())[self.name][level]


COIN_COLLECTOR = Game(
    name="coin",
    title="CoinCollector",
    task="Find the coin and take it.",
    params="numLocations={rooms},numDistractorItems=0,includeDoors=0",
    levels={
        "easy": Level(rooms=11, distances=(2, 3), max_steps=7, chance=(0.35, 0.65)),
        "medium": Level(rooms=11, distances=(4,), max_steps=6, chance=(0.08, 0.15)),
        "hard": Level(rooms=11, distances=(4,), max_steps=6, chance=(0.0, 0.04)),
    },
)
MAP_READER = Game(
    name="mapreader",
    title="MapReader",
    task="Find the coin, take it and bring it to the {start}.",
    params="numLocations={rooms},maxDistanceApart={distance},maxDistractorItemsPerLocation=0,includeDoors=0",
    levels={
        "easy": Level(rooms=11, distances=(1, 2), max_steps=8, chance=(0.5, 0.95)),
        "medium": Level(rooms=11, distances=(3,), max_steps=7, chance=(0.08, 0.2)),
        "hard": Level(rooms=20, distances=(5,), max_steps=11, chance=(0.0, 0.03)),
    },
)
GAMES = {game.name: game for game in (COIN_COLLECTOR, MAP_READER)}
