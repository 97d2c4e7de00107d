"""Play ALFWorld's evaluation games with a scripted searcher: what notes are worth at 20, 30 and 50 steps.

    .venv/bin/python experiments/alfworld_search.py alfworld.zip

It knows what the task asks for, and looks into one place after the other, in an order drawn anew in each episode. With
true notes it goes first to where the things that it needs lie.
"""

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from empo2.agents.alfworld.archive import Archive
from empo2.agents.alfworld.engine import Engine
from empo2.agents.alfworld.games import TASKS, Game

LIMITS = (20, 30, 50)
APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
LIGHT, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"


class Searcher:
    """One episode. `steps` are the actions that it took; more than the largest limit: it has given up."""

    def __init__(self, game: Game, order: Sequence[str]) -> None:
        self._engine, self._order, self._game = Engine(game), order, game
        self._seen: dict[str, str] = {}  # what was last read of a place
        self.steps = 0

    @property
    def won(self) -> bool:
        return self._engine.won

    def play(self) -> None:
        thing, where = self._game.target
        verb = self._game.task.split("_")[1]
        for _ in range(2 if self._game.task == TWO else 1):
            held = self._fetch(thing, self._game.task == TWO and where)
            if held is None:
                return
            if self._game.task == LIGHT:
                self._light(where)
            else:
                if verb in APPLIANCES:
                    self._go(self._of_type(APPLIANCES[verb])[0])
                    self._do(f"{verb} {held} with {self._of_type(APPLIANCES[verb])[0]}")
                self._put(held, where)

    def _fetch(self, thing: str, keep: str | bool) -> str | None:
        """Find and take a thing, but not from where it belongs (`keep`)."""
        for place in self._visited(thing):
            taken = [
                command for command in self._engine.commands if re.fullmatch(rf"take {thing} \d+ from {place}", command)
            ]
            if taken and not (keep and place.startswith(f"{keep} ")):
                self._do(taken[0])
                return re.fullmatch(rf"take (.*) from {place}", taken[0])[1]  # pyright: ignore[reportOptionalSubscript]
        return None

    def _light(self, lamp: str) -> None:
        for _ in self._visited(lamp):
            if on := [command for command in self._engine.commands if command.startswith(f"use {lamp} ")]:
                self._do(on[0])
                return

    def _put(self, held: str, where: str) -> None:
        places = self._of_type(where)
        # The second of two things goes to the first.
        places.sort(key=lambda place: not re.search(rf"\b{self._game.target[0]} \d", self._seen.get(place, "")))
        for place in places:
            self._go(place)
            if f"move {held} to {place}" in self._engine.commands:
                self._do(f"move {held} to {place}")
                self._seen[place] = f"{self._seen[place]} {held}"
                return

    def _visited(self, thing: str) -> Iterator[str]:
        """Go to places, first to those where the thing was seen, then to those not seen yet; yield each."""
        known = [place for place, text in self._seen.items() if re.search(rf"\b{thing} \d", text)]
        for place in [*known, *(place for place in self._order if place not in self._seen)]:
            self._go(place)
            yield place

    def _go(self, place: str) -> None:
        text = self._do(f"go to {place}") if f"go to {place}" in self._engine.commands else ""
        if f"open {place}" in self._engine.commands:
            text = self._do(f"open {place}")
        elif not text:  # at this place already, having come to another one of it
            text = self._do(f"examine {place}")
        self._seen[place] = text

    def _do(self, command: str) -> str:
        self.steps += 1
        return self._engine.step(command)

    def _of_type(self, kind: str) -> list[str]:
        return [place.name for place in self._game.receptacles if place.type == kind]


def steps_to_win(game: Game, notes: bool, seed: int) -> int | None:
    """Return the actions of one episode that was won; None if it was not."""
    order = [place.name for place in game.receptacles]
    random.Random(seed).shuffle(order)
    if notes:
        needed = [thing for thing in game.things if thing.type in game.target]
        first = [game.receptacles[index].name for thing in needed for index in thing.receptacles]
        order = [*dict.fromkeys([*first, *order])]
    searcher = Searcher(game, order)
    searcher.play()
    return searcher.steps if searcher.won else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Play ALFWorld's evaluation games with a scripted searcher.")
    parser.add_argument("games", type=Path, metavar="FILE", help="of `python -m empo2.agents.alfworld import`")
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="episodes per game (default: %(default)s)")
    options = parser.parse_args()
    archive = Archive(options.games)
    print("| split | task |", *(f"{limit} steps, no notes | true notes |" for limit in LIMITS))
    print("|---|---|" + "---|" * 2 * len(LIMITS))
    for split in ("valid_seen", "valid_unseen"):
        found = defaultdict[tuple[str, bool], list[int | None]](list)
        for name in archive.names[split]:
            game = archive.game(split, name)
            for notes in (False, True):
                steps = [steps_to_win(game, notes, seed) for seed in range(options.samples)]
                found[game.task, notes] += steps
                found["all", notes] += steps
        for task in (*TASKS, "all"):
            rates = [success(found[task, notes], limit) for limit in LIMITS for notes in (False, True)]
            print(f"| {split} | {task} |", *(f"{rate:.0%} |" for rate in rates))


def success(steps: Sequence[int | None], limit: int) -> float:
    """Return the share of episodes that were won in at most `limit` steps."""
    return sum(taken is not None and taken <= limit for taken in steps) / len(steps)


if __name__ == "__main__":
    main()
