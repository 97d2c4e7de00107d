"""Find the houses of a level, write the panels of a world, and say how hard its levels are to a scripted player.

python -m empo2.small_model.levels WORLD [--only-measure]
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from empo2.agents.coin_collector import environment as coin_collector
from empo2.agents.coin_collector import levels as coin_levels
from empo2.agents.houses.house import TAKE, House
from empo2.agents.houses.levels import Level, read_panel
from empo2.agents.map_reader import environment as map_reader
from empo2.agents.map_reader import levels as map_levels
from empo2.agents.textworld_express.environment import Environment
from empo2.small_model.notes import Note, Turn, note_of, way_to
from empo2.small_model.player import Player
from empo2.small_model.rows import play

PLAYS = 200  # of the scripted explorer, for the chance of a house
PANEL_SEEDS = range(100_000)
TRAIN, UNSEEN = 16, 16  # houses of a panel
EARLIER = (0, 1, 4, 8)  # episodes whose notes are shown, for the table of docs/houses.md
CHAINS = 20  # of episodes in each house, each with the notes of those before it

Result = tuple[bool, Note]  # whether an episode succeeded, and what its player notes


@dataclass(frozen=True)
class World:
    """A game in houses, and how a scripted player plays it."""

    levels: Mapping[str, Level]
    panels: Path
    walk: Callable[[Environment, Level, int], House | None]  # None where a seed has no house of this level
    play: Callable[[House, Sequence[Note], int, random.Random], Result]


def collect(house: House, notes: Sequence[Note], max_steps: int, generator: random.Random) -> Result:
    """Play CoinCollector."""
    played = play(house, notes, max_steps, 0.0, generator)
    return played.success, note_of(played.turns, played.success)


def bring_back(house: House, notes: Sequence[Note], max_steps: int, generator: random.Random) -> Result:
    """Play MapReader: search the coin, then go back on a shortest way through the rooms that were seen."""
    player, room, turns = Player(notes, generator), house.start, list[Turn]()
    for _ in range(max_steps):
        exits = house.doors[room]
        turns.append(Turn(room, exits, player.act(room, exits, room == house.coin)))
        if turns[-1].action == TAKE:
            # A way through seen rooms alone is as long as it was thought to be.
            back = way_to(player.exits, room, house.start)
            return len(turns) + len(back) <= max_steps, note_of(turns, True)
        room = exits[turns[-1].action.removeprefix("move ")]
    return False, note_of(turns, False)


def _walk_coin_collector(world: Environment, level: Level, seed: int) -> House:
    return coin_collector.walk(world, level.rooms, seed)


def _walk_map_reader(world: Environment, level: Level, seed: int) -> House | None:
    try:
        return map_reader.walk(world, level.rooms, max(level.distances), seed)
    except ValueError:
        return None  # no rooms so far apart


WORLDS = {
    "coin_collector": World(coin_levels.LEVELS, coin_levels.PANELS, _walk_coin_collector, collect),
    "map_reader": World(map_levels.LEVELS, map_levels.PANELS, _walk_map_reader, bring_back),
}
COIN_COLLECTOR = WORLDS["coin_collector"]  # the small model's


def chance(world: World, house: House, max_steps: int, plays: int = PLAYS) -> float:
    """Return how often the scripted explorer, which knows nothing of the house, succeeds."""
    generator = random.Random(0)
    return sum(world.play(house, [], max_steps, generator)[0] for _ in range(plays)) / plays


def learned(world: World, houses: Sequence[House], max_steps: int) -> list[float]:
    """Return how often the scripted player succeeds with its notes of so many earlier episodes as EARLIER says."""
    generator = random.Random(0)
    counts = dict.fromkeys(range(max(EARLIER) + 1), 0)
    for house in [*houses] * CHAINS:
        notes: list[Note] = []
        for number in counts:
            success, note = world.play(house, notes, max_steps, generator)
            counts[number] += success
            notes.append(note)
    return [counts[number] / (CHAINS * len(houses)) for number in EARLIER]


def fits(world: World, house: House, level: Level) -> bool:
    """Whether the house is of this level."""
    if house.distance not in level.distances:
        return False
    low, high = level.chance
    return low <= chance(world, house, level.max_steps) <= high


def houses(world: World, seeds: Iterable[int], level: str) -> Iterator[tuple[int, House]]:
    """Find those of the seeds whose houses are of this level. Starts Java; some 90 seeds are walked a second."""
    with Environment() as java:
        for seed in seeds:
            house = world.walk(java, world.levels[level], seed)
            if house and fits(world, house, world.levels[level]):
                yield seed, house


def first(seeds: Iterable[int], level: str, count: int) -> list[House]:
    """Return the first `count` houses of CoinCollector of this level. Raises ValueError where the seeds have fewer."""
    found = [house for _, house in islice(houses(COIN_COLLECTOR, seeds, level), count)]
    if len(found) < count:
        raise ValueError(f"{level}: {len(found)} houses among {seeds}, {count} are wanted")
    return found


def of_panel(world: World, level: str) -> list[House]:
    """Return all houses of a level's panel. Starts Java."""
    seeds = read_panel(world.panels, level)
    with Environment() as java:
        walked = [world.walk(java, world.levels[level], seed) for part in seeds.values() for seed in part]
    return [house for house in walked if house]


def _write(world: World) -> None:
    panels: dict[str, dict[str, list[int]]] = {}
    used: set[int] = set()  # in MapReader a seed has a house at every distance
    for level in world.levels:
        free = (seed for seed in PANEL_SEEDS if seed not in used)
        seeds = [seed for seed, _ in islice(houses(world, free, level), TRAIN + UNSEEN)]
        if len(seeds) < TRAIN + UNSEEN:
            raise SystemExit(f"{level}: {len(seeds)} houses among {PANEL_SEEDS}, {TRAIN + UNSEEN} are needed")
        used |= set(seeds)
        panels[level] = {"train": seeds[:TRAIN], "unseen": seeds[TRAIN:]}
    lines = ",\n".join(f'  "{level}": {json.dumps(panel)}' for level, panel in panels.items())
    world.panels.write_text(f"{{\n{lines}\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--only-measure", action="store_true", help="leave the panels as they are")
    arguments = parser.parse_args()
    world = WORLDS[arguments.world]
    if not arguments.only_measure:
        _write(world)
    for name, level in world.levels.items():
        shares = learned(world, of_panel(world, name), level.max_steps)
        print(name, ", ".join(f"{share:.1%} with {count}" for count, share in zip(EARLIER, shares, strict=True)))


if __name__ == "__main__":
    main()
