"""What scripted players find in the deep houses, for docs/houses.md: by chance, by notes of failures, by an oracle.

python -m empo2.small_model.deep

Each house is played EPISODES times, one after the other. After each episode its player leaves one note; the next player
knows all of them. A reader ignores what it knows at a share of its turns.
"""

import argparse
import random
from collections.abc import Callable, Sequence

from empo2.agents.houses.games import COIN_COLLECTOR, Level
from empo2.agents.houses.house import House
from empo2.small_model.notes import Note, Turn, frontier_of, note_of, way_to
from empo2.small_model.rows import play

HOUSES, EPISODES = 200, 96
BY = (8, 20, 48, 96)  # episodes
LAST = 20  # episodes, of the success at the end
IGNORES = (0.0, 0.2, 0.3)

type Writer = Callable[[Sequence[Turn], bool], Note]


def streams(houses: Sequence[House], max_steps: int, write: Writer, ignores: float, seed: int = 0) -> list[list[bool]]:
    """Return which episodes of each house found the coin, [houses][EPISODES]."""
    generator, results = random.Random(seed), []
    for house in houses:
        notes: dict[Note, None] = {}  # equal ones once, in their order
        won = []
        for _ in range(EPISODES):
            played = play(house, list(notes), max_steps, 0.0, generator, ignores)
            notes[write(played.turns, played.success)] = None
            won.append(played.success)
        results.append(won)
    return results


def found_by(results: Sequence[Sequence[bool]], episode: int) -> float:
    """Return the share of houses whose coin was found in one of the first episodes."""
    return sum(any(won[:episode]) for won in results) / len(results)


def at_the_end(results: Sequence[Sequence[bool]]) -> float:
    """Return the share of the last episodes that found the coin."""
    return sum(sum(won[-LAST:]) for won in results) / (LAST * len(results))


def oracle(houses: Sequence[House], max_steps: int) -> float:
    """Return the success of players who are shown a true note of the way."""
    told = [Note(house.coin, way_to(house.doors, house.start, house.coin), found=True) for house in houses]
    generator = random.Random(0)
    return sum(
        play(house, [note], max_steps, 0.0, generator).success for house, note in zip(houses, told, strict=True)
    ) / len(houses)


def forgets(turns: Sequence[Turn], success: bool) -> Note:
    """Return a note that says nothing but where the house begins."""
    return Note(turns[0].room)


def lines(level: Level) -> list[str]:
    """Return a level's rows of the table."""
    houses, steps = [level.made(seed) for seed in range(HOUSES)], level.max_steps
    (depth,) = level.distances
    players = [("chance", forgets, 0.0), ("reads how far others came", note_of, 0.0)]
    players += [(f"reads what led nowhere, ignores {100 * each:.0f} %", frontier_of, each) for each in IGNORES]
    made = []
    for name, write, ignores in players:
        results = streams(houses, steps, write, ignores)
        cells = [f"{found_by(results, episode):.2f}" for episode in BY] + [f"{at_the_end(results):.2f}"]
        made.append(f"| {depth}, {level.rooms} | {name} | {' | '.join(cells)} |")
    shown = " | ".join(["1.00"] * len(BY)) if (share := oracle(houses, steps)) == 1 else "not all"
    return [*made, f"| {depth}, {level.rooms} | oracle: knows the way | {shown} | {share:.2f} |"]


def table() -> str:
    """Return the table in Markdown."""
    found = " | ".join(f"by {episode}" for episode in BY)
    head = f"| junctions, rooms | player | coins found {found} | success in the last {LAST} |\n"
    head += f"|---|---|{'---|' * len(BY)}---|\n"
    return head + "\n".join(line for level in COIN_COLLECTOR.levels.values() if level.deep for line in lines(level))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(table())
