"""What is to be had in the houses without knowing them, as they are and in disguise: the table of docs/houses.md.

    .venv/bin/python bench/houses.py

A *preference order* is a policy that weights can learn by heart: of the rooms that a player sees behind the doors and
has not been in, it enters the one that comes first in a fixed order of all names, in every house. An order that finds
more coins in houses that it was not fitted on than the explorer does tells what those houses have in common.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from statistics import mean

from empo2.agents.houses.games import COIN_COLLECTOR
from empo2.agents.houses.house import DIRECTIONS, House, in_disguise
from empo2.small_model.levels import chance

PAGE = Path(__file__).parents[1] / "docs/houses.md"
BEGIN, END = "<!-- made by bench/houses.py -->", "<!-- end -->"
LEVEL = COIN_COLLECTOR.levels["hard"]
RESTARTS, SWAPS = 8, 1000  # of the climb to a good order
FITS = 5  # disguises that orders are fitted to; as the game made them, all parts of the houses to train on
DISGUISES = 40  # others, of the houses that orders are tested in

type Key = Callable[[str, str], str]  # what of a door (direction, room behind it) is preferred or not
KEYS: dict[str, Key] = {
    "names": lambda direction, room: room,
    "directions": lambda direction, room: direction,
    "doors": lambda direction, room: f"{direction} {room}",
}


def finds(order: Sequence[str], key: Key, house: House) -> bool:
    """Return whether a player who follows the order finds the coin within the level's steps."""
    rank = {preferred: place for place, preferred in enumerate(order)}
    room, seen = house.start, {house.start}
    for _ in range(LEVEL.max_steps - 1):  # the last step takes the coin
        exits = house.doors[room]
        new = {direction: behind for direction, behind in exits.items() if behind not in seen}
        room = min((new or exits).items(), key=lambda door: rank[key(*door)])[1]
        seen.add(room)
        if room == house.coin:
            return True
    return False


def found(order: Sequence[str], key: Key, houses: Sequence[House]) -> float:
    return mean(finds(order, key, house) for house in houses)


def fitted(key: Key, items: Sequence[str], houses: Sequence[House], generator: random.Random) -> list[str]:
    """Return the order that finds the most of these houses' coins: the best of all, or of several climbs by swaps."""
    if len(items) <= 5:
        return list(max(permutations(items), key=lambda order: found(order, key, houses)))
    climbs = []
    for _ in range(RESTARTS):
        order = generator.sample(items, len(items))
        score = found(order, key, houses)
        for _ in range(SWAPS):
            other = list(order)
            other.insert(generator.randrange(len(other)), other.pop(generator.randrange(len(other))))
            if (reached := found(other, key, houses)) >= score:
                order, score = other, reached
        climbs.append((score, order))
    return max(climbs)[1]


def items_of(key: Key, houses: Sequence[House]) -> list[str]:
    """Return all that a preference can be for."""
    rooms = sorted({room for house in houses for room in house.doors})
    return sorted({key(direction, room) for direction in DIRECTIONS for room in rooms})


def generalises(key: Key, fit: Sequence[Sequence[House]], test: Sequence[House], generator: random.Random) -> float:
    """Return the share of coins of the test houses that orders find, each fitted to one of the sets of houses."""
    items = items_of(key, test)
    return mean(found(fitted(key, items, houses, generator), key, test) for houses in fit)


def all_in_disguise(houses: dict[int, House], number: int) -> list[House]:
    return [in_disguise(house, seed, number) for seed, house in houses.items()]


def table() -> str:
    """Return the measurements as a Markdown table; some five minutes on one core."""
    generator = random.Random(0)
    train, test = COIN_COLLECTOR.houses("hard").values()
    plain = list(test.values())
    disguised = [house for number in range(1, DISGUISES + 1) for house in all_in_disguise(test, number)]
    lines = []
    explored = [
        mean(chance(COIN_COLLECTOR, house, LEVEL.max_steps) for house in houses)
        for houses in (plain, all_in_disguise(test, 1))
    ]
    lines.append(("scripted explorer", *explored))
    names = items_of(KEYS["names"], plain)
    orders = [generator.sample(names, len(names)) for _ in range(1000)]
    by_chance = [mean(found(order, KEYS["names"], houses) for order in orders) for houses in (plain, disguised[:32])]
    lines.append(("random orders of the names", *by_chance))
    for what, key in KEYS.items():
        for count in (8, 16, len(train)):
            parts = [dict(list(train.items())[begin:][:count]) for begin in range(0, len(train), count)]
            bare = generalises(key, [list(part.values()) for part in parts], plain, generator)
            fits = [all_in_disguise(parts[0], DISGUISES + number) for number in range(1, FITS + 1)]
            hidden = generalises(key, fits, disguised, generator)
            lines.append((f"order of {what}, fitted on {count}", bare, hidden))
    rows = [f"| {what} | {100 * bare:.1f} % | {100 * hidden:.1f} % |" for what, bare, hidden in lines]
    head = f"| coins found in {len(test)} other houses | as they are | in disguise |\n|---|---|---|\n"
    return head + "\n".join(rows)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
