"""The houses of TextWorld-Express, found by walking through them; and houses to learn from, renamed and turned."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

from empo2.agents.houses.games import COIN_COLLECTOR, Game, Level
from empo2.agents.houses.house import OPPOSITE, Disguise, House, distances
from empo2.agents.textworld_express.environment import Environment

FOLD = "train"  # of no consequence: in these games a house follows from its parameters and the seed alone
_ROOM = re.compile(r"\AYou are in the ([^.]+)\.")
_EXIT = re.compile(r"To the (North|East|South|West) you see the ([^.]+)\.")
_COIN = re.compile(r"\ba coin\b")

# Seeds of houses, disjoint from each other and from the panels' (below 100,000).
MAKE_SEEDS = range(100_000, 110_000)  # the training data
DEV_SEEDS = range(110_000, 120_000)  # choices of format, data and size
LEVEL_SEEDS = range(120_000, 140_000)  # how hard a level is
TEST_SEEDS = range(140_000, 160_000)  # the numbers of the model card, and nothing else

ROOM_COUNTS = (11, 11, 11, 9, 7)  # of the training houses, in turn
DISTANCES = {1: 1, 2: 3, 3: 4, 4: 4, 5: 4, 6: 3, 7: 2}  # moves to the coin, and how often each is drawn

_NAMES = """
kitchen, pantry, bathroom, bedroom, living room, laundry room, corridor, backyard, driveway, street,
supermarket, den, cellar, balcony, attic, garage, library, study, hall, porch, garden, workshop, office,
nursery, dining room, guest room, music room, game room, storage room, closet, shed, greenhouse, terrace,
lobby, lounge, gym, chapel, vault, tower, stable, barn, courtyard, bakery, bank, cafe, chemist, museum, park,
harbour, market, school, station, theatre, alley, bridge, fountain, cinema, clinic, farm, forge, mill, orchard,
playground
"""
NAMES = [name.strip() for name in _NAMES.split(",")]


def walk(world: Environment, game: Game, level: Level, seed: int) -> House:
    """Return the level's house of this seed, found by walking through every door.

    Raises ValueError where there is none: MapReader may have no rooms so far apart.
    """
    doors: dict[str, Mapping[str, str]] = {}
    coins: list[str] = []

    def visit(observation: str) -> str:
        room = _ROOM.match(observation)
        if room is None:
            raise ValueError(f"{game.title}, seed {seed}: no room in {observation!r}")
        doors[room[1]] = exits = {direction.lower(): behind for direction, behind in _EXIT.findall(observation)}
        if _COIN.search(observation):
            coins.append(room[1])
        for direction, behind in exits.items():
            if behind not in doors:
                visit(world.step(f"move {direction}").observation)
                world.step(f"move {OPPOSITE[direction]}")
        return room[1]

    start = visit(world.reset(game.name, game.params_of(level), FOLD, seed, max_steps=1000).observation)
    (coin,) = coins
    return House(start, coin, doors)


def walk_all(seeds: Sequence[int], room_counts: Sequence[int] = ROOM_COUNTS) -> list[House]:
    """Return the houses of these seeds; takes a hundredth of a second each, and starts Java once."""
    levels = [replace(COIN_COLLECTOR.levels["hard"], rooms=rooms) for rooms in room_counts]
    with Environment() as world:
        return [walk(world, COIN_COLLECTOR, level, seed) for level, seed in zip(cycle(levels), seeds, strict=False)]


def disguised(house: House, generator: random.Random) -> House:
    """Return the same house with new names, a turned or mirrored compass, another start and another place of the coin.

    The distance of the coin is drawn by DISTANCES, from those that the house has.
    """
    doors = Disguise.drawn(house, NAMES, generator).house(house).doors
    pairs: dict[int, list[tuple[str, str]]] = {}
    for start in sorted(doors):
        for room, moves in distances(doors, start).items():
            if moves in DISTANCES:
                pairs.setdefault(moves, []).append((start, room))
    possible = sorted(pairs)
    (moves,) = generator.choices(possible, [DISTANCES[moves] for moves in possible])
    start, coin = generator.choice(pairs[moves])
    return House(start, coin, doors)
