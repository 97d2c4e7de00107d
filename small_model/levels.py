"""Find the houses of a level, and write the panels of agents/coin_collector.

python -m empo2.small_model.levels
"""

import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice

from empo2.agents.coin_collector.environment import walk
from empo2.agents.coin_collector.house import House
from empo2.agents.coin_collector.levels import LEVELS, PANELS, Level
from empo2.agents.textworld_express.environment import Environment
from empo2.small_model.rows import play

PLAYS = 200  # of the scripted explorer, for the chance of a house
PANEL_SEEDS = range(100_000)
TRAIN, UNSEEN = 16, 16  # houses of a panel


def chance(house: House, max_steps: int, plays: int = PLAYS) -> float:
    """Return how often the scripted explorer, which knows nothing of the house, finds the coin."""
    generator = random.Random(0)
    return sum(play(house, [], max_steps, 0.0, generator).success for _ in range(plays)) / plays


def fits(house: House, level: Level) -> bool:
    """Whether the house is of this level."""
    if house.distance not in level.distances:
        return False
    low, high = level.chance
    return low <= chance(house, level.max_steps) <= high


def houses(seeds: Iterable[int], level: str) -> Iterator[tuple[int, House]]:
    """Find those of the seeds whose houses are of this level. Starts Java; some 90 seeds are walked a second."""
    with Environment() as world:
        for seed in seeds:
            house = walk(world, LEVELS[level].rooms, seed)
            if fits(house, LEVELS[level]):
                yield seed, house


def first(seeds: Iterable[int], level: str, count: int) -> list[House]:
    """Return the first `count` houses of this level. Raises ValueError where the seeds have fewer."""
    found = [house for _, house in islice(houses(seeds, level), count)]
    if len(found) < count:
        raise ValueError(f"{level}: {len(found)} houses among {seeds}, {count} are wanted")
    return found


def main() -> None:
    panels = {}
    for level in LEVELS:
        seeds = [seed for seed, _ in islice(houses(PANEL_SEEDS, level), TRAIN + UNSEEN)]
        if len(seeds) < TRAIN + UNSEEN:
            raise SystemExit(f"{level}: {len(seeds)} houses among {PANEL_SEEDS}, {TRAIN + UNSEEN} are needed")
        panels[level] = {"train": seeds[:TRAIN], "unseen": seeds[TRAIN:]}
        print(level, len(seeds))
    lines = ",\n".join(f'  "{level}": {json.dumps(panel)}' for level, panel in panels.items())
    PANELS.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
