"""Find the houses of each level of a game, write them, and say how hard the levels are to a scripted player.

python -m empo2.small_model.levels GAME [--only-measure]
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate, islice
from typing import Any

from empo2.agents.houses.games import COIN_COLLECTOR, GAMES, HOUSES, MAP_READER, Game, Level
from empo2.agents.houses.house import TAKE, House, in_disguise
from empo2.agents.textworld_express.environment import Environment
from empo2.small_model.houses import walk
from empo2.small_model.notes import Note, Turn, note_of, way_to
from empo2.small_model.player import Player
from empo2.small_model.rows import play

PLAYS = 200  # of the scripted explorer, for the chance of a house
PANEL_SEEDS = range(100_000)
TRAIN, UNSEEN = 16, 16  # houses of a panel
MORE = {(COIN_COLLECTOR.name, "hard"): (48, 16)}  # houses that a panel was given later
EARLIER = (0, 1, 4, 8)  # episodes whose notes are shown, for the table of docs/houses.md
CHAINS = 20  # of episodes in each house, each with the notes of those before it

Result = tuple[bool, Note]  # whether an episode succeeded, and what its player notes


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


PLAYERS: dict[str, Callable[[House, Sequence[Note], int, random.Random], Result]] = {
    COIN_COLLECTOR.name: collect,
    MAP_READER.name: bring_back,
}


def chance(game: Game, house: House, max_steps: int) -> float:
    """Return how often the scripted explorer, which knows nothing of the house, succeeds."""
    generator = random.Random(0)
    return sum(PLAYERS[game.name](house, [], max_steps, generator)[0] for _ in range(PLAYS)) / PLAYS


def learned(game: Game, houses: Sequence[House], max_steps: int) -> list[float]:
    """Return how often the scripted player succeeds with its notes of so many earlier episodes as EARLIER says."""
    generator = random.Random(0)
    counts = dict.fromkeys(range(max(EARLIER) + 1), 0)
    for house in [*houses] * CHAINS:
        notes: list[Note] = []
        for number in counts:
            success, note = PLAYERS[game.name](house, notes, max_steps, generator)
            counts[number] += success
            notes.append(note)
    return [counts[number] / (CHAINS * len(houses)) for number in EARLIER]


def fits(game: Game, house: House, level: Level) -> bool:
    """Whether the house is of this level."""
    if house.distance not in level.distances:
        return False
    low, high = level.chance
    return low <= chance(game, house, level.max_steps) <= high


def houses(game: Game, seeds: Iterable[int], level: str) -> Iterator[tuple[int, House]]:
    """Find those of the seeds whose houses are of this level. Starts Java; some 90 seeds are walked a second."""
    with Environment() as world:
        for seed in seeds:
            with suppress(ValueError):  # in MapReader not every seed has rooms so far apart
                house = walk(world, game, game.levels[level], seed)
                if fits(game, house, game.levels[level]):
                    yield seed, house


def first(seeds: Iterable[int], level: str, count: int, disguise: int = 0) -> list[House]:
    """Return the first `count` houses of CoinCollector of this level. Raises ValueError where the seeds have fewer."""
    found: list[tuple[int, House]]
    if (deep := COIN_COLLECTOR.levels[level]).deep:
        found = [(seed, deep.made(seed)) for seed in islice(seeds, count)]
    else:
        found = list(islice(houses(COIN_COLLECTOR, seeds, level), count))
    if len(found) < count:
        raise ValueError(f"{level}: {len(found)} houses among {seeds}, {count} are wanted")
    return [in_disguise(house, seed, disguise) for seed, house in found]


def of_panel(game: Game, level: str) -> list[House]:
    """Return the houses of a level's panel, without those that it was given later."""
    train, unseen = (list(found.values()) for found in game.houses(level).values())
    return [*train[:TRAIN], *unseen[:UNSEEN]]


def _write(game: Game) -> None:
    panels = json.loads(HOUSES.read_text()) | {game.name: {}}
    used: set[int] = set()  # in MapReader a seed has a house at every distance
    for level, limits in game.levels.items():
        if limits.deep:
            continue
        free = (seed for seed in PANEL_SEEDS if seed not in used)
        parts = (TRAIN, UNSEEN, *MORE.get((game.name, level), (0, 0)))
        found = [(seed, asdict(house)) for seed, house in islice(houses(game, free, level), sum(parts))]
        if len(found) < sum(parts):
            raise SystemExit(f"{level}: {len(found)} houses among {PANEL_SEEDS}, {sum(parts)} are needed")
        used |= {seed for seed, _ in found}
        ends = zip(accumulate(parts), parts, strict=True)
        train, unseen, more, more_unseen = (found[end - count : end] for end, count in ends)
        panels[game.name][level] = {"train": dict(train + more), "unseen": dict(unseen + more_unseen)}
    HOUSES.write_text(_text(panels) + "\n")


def _text(node: dict[str, Any], indent: str = "") -> str:
    """Return JSON with a line for each house."""
    if "doors" in node:
        return json.dumps(node)
    inner = f",\n{indent}  ".join(f'"{name}": {_text(value, indent + "  ")}' for name, value in node.items())
    return f"{{\n{indent}  {inner}\n{indent}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--only-measure", action="store_true", help="leave the houses as they are")
    arguments = parser.parse_args()
    game = GAMES[arguments.game]
    if not arguments.only_measure:
        _write(game)
    for name, level in game.levels.items():
        shares = learned(game, of_panel(game, name), level.max_steps)
        print(name, ", ".join(f"{share:.1%} with {count}" for count, share in zip(EARLIER, shares, strict=True)))


if __name__ == "__main__":
    main()
