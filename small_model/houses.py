"""Houses to learn from: TextWorld-Express's own, with rooms renamed and the compass turned, so that none is learned."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from empo2.agents.houses.environment import walk
from empo2.agents.houses.games import COIN_COLLECTOR
from empo2.agents.houses.house import Disguise, House, distances
from empo2.agents.textworld_express.environment import Environment

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
