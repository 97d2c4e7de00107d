"""Measure a model on houses it has never seen: without notes, with its own, with true ones, with another house's.

    python -m empo2.small_model.evaluate [--model smollm2-135m-notes] [--level hard] [--output FILE]

The notes come in the form in which the gateway shows them; the memory is a list for each house.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from empo2.agents.houses.games import COIN_COLLECTOR
from empo2.agents.houses.house import House
from empo2.memory.cpu import fast_dtype
from empo2.recipe.config import Reflection, load_settings
from empo2.recipe.files.models import NOTES, SMOLLM2, resolve_model
from empo2.small_model.episodes import Episode, play
from empo2.small_model.failures import Earlier, told
from empo2.small_model.houses import DEV_SEEDS, LEVEL_SEEDS, TEST_SEEDS
from empo2.small_model.levels import first
from empo2.small_model.make import WORLD
from empo2.small_model.notes import Note, parse, render, way_to

SEEDS = {"dev": DEV_SEEDS, "level": LEVEL_SEEDS, "test": TEST_SEEDS}
BATCH = 64  # episodes at once: some 2 GB of key-value cache


@dataclass(frozen=True)
class Cell:
    """A number of the table: a share with its 95 % interval, bootstrapped over houses, and how many it is made of."""

    share: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.share:.2f} ({self.low:.2f}-{self.high:.2f}), {self.count}"


def share(values: Sequence[tuple[str, int, int]]) -> Cell | None:
    """Return the share of hits; each value is (house, hits, of how many)."""
    houses: dict[str, list[int]] = {}
    for house, hits, count in values:
        known = houses.setdefault(house, [0, 0])
        known[0] += hits
        known[1] += count
    table = np.array(list(houses.values()))
    if not len(table) or not table[:, 1].sum():
        return None
    generator = np.random.default_rng(0)
    drawn = table[generator.integers(0, len(table), (2000, len(table)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / np.maximum(drawn[:, 1], 1), (0.025, 0.975))
    hits, count = table.sum(axis=0)
    return Cell(round(float(hits / count), 3), round(float(low), 3), round(float(high), 3), int(count))


def measured(episodes: Sequence[Episode]) -> dict[str, Cell | None]:
    """Return how often the coin was found, actions were possible and as true notes say, and tips were true.

    As notes say: of the rooms for which one tells a door to take, or doors that lead nowhere.
    """

    def over(chosen: Sequence[Episode], hit: Callable[[Episode], int], count: Callable[[Episode], int] = lambda _: 1):
        return share([(_name(episode.house), hit(episode), count(episode)) for episode in chosen])

    failed = [episode for episode in episodes if episode.tip and not episode.success]
    return {
        "found": over(episodes, lambda episode: episode.success),
        "valid": over(episodes, lambda episode: episode.valid, lambda episode: len(episode.turns)),
        "as told": over(episodes, lambda each: sum(_followed(each)), lambda each: len(_followed(each))),
        "true after success": over([e for e in episodes if e.tip and e.success], lambda episode: episode.tip_true),
        "true after failure": over(failed, lambda episode: episode.tip_true),
    }


def _followed(episode: Episode) -> list[bool]:
    """Return of each room for which true notes tell a door, whether the player did as they say."""
    notes = [note for text in episode.shown if (note := parse(text)) and note.true_of(episode.house)]
    return [did for _, did in told(episode.turns, {0: [Earlier(note, frozenset()) for note in notes]})]


def _name(house: House) -> str:
    return f"{house.coin} {sorted((room, *sorted(exits.items())) for room, exits in house.doors.items())}"


class Trial:
    """One model on one level's houses: every cell of the table."""

    def __init__(self, model: Any, tokenizer: Any, houses: Sequence[House], max_steps: int, reflection: Reflection):
        self._model, self._tokenizer, self._reflection = model, tokenizer, reflection
        self._houses, self._max_steps = list(houses), max_steps
        self._generator, self._seed = random.Random(0), 0
        self.episodes: dict[str, list[Episode]] = {}

    def alone(self, repeats: int) -> None:
        """Play without notes."""
        self._play("no notes", [[] for _ in self._houses], repeats)

    def chain(self, rounds: int) -> None:
        """Play episodes one after the other in each house, each with its own notes of all earlier ones, shuffled."""
        notes: list[list[str]] = [[] for _ in self._houses]
        for number in range(rounds + 1):
            shown = [self._generator.sample(known, len(known)) for known in notes]
            for known, episode in zip(notes, self._play(f"own notes of {number}", shown), strict=True):
                known += [episode.tip] if episode.tip else []

    def true(self, repeats: int) -> None:
        """Show one true note that says where the coin is."""
        self._play("true note", [[true_note(house)] for house in self._houses], repeats)

    def strange(self, repeats: int) -> None:
        """Show what is true of another house: where its coin is, and an own note on it if there is one."""
        others = [*self._houses[1:], self._houses[0]]
        written = {_name(e.house): e.tip for e in self.episodes.get("no notes", []) if e.tip and not e.success}
        shown = [[true_note(other), *filter(None, [written.get(_name(other))])] for other in others]
        self._play("another house's notes", shown, repeats)

    def failures(self, count: int, repeats: int) -> None:
        """Show own notes of failures alone, of episodes that were played without notes."""
        written: dict[str, list[str]] = {_name(house): [] for house in self._houses}
        for episode in self.episodes["no notes"]:
            if episode.tip and not episode.success:
                written[_name(episode.house)].append(episode.tip)
        shown = [written[_name(house)][:count] for house in self._houses]
        self._play(f"{count} notes of failures", shown, repeats)

    def _play(self, name: str, notes: Sequence[Sequence[str]], repeats: int = 1) -> list[Episode]:
        houses, shown = self._houses * repeats, [*notes] * repeats
        played: list[Episode] = []
        for begin in range(0, len(houses), BATCH):
            part = slice(begin, begin + BATCH)
            options = {"seed": self._seed, "reflection": self._reflection}
            played += play(self._model, self._tokenizer, houses[part], shown[part], self._max_steps, **options)
            self._seed += 1
        self.episodes[name] = played
        line = {key: str(cell) for key, cell in measured(played).items() if cell}
        print(json.dumps({"notes": name, **line}), flush=True)
        return played


def true_note(house: House) -> str:
    return render(Note(house.coin, way_to(house.doors, house.start, house.coin), found=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=NOTES)
    parser.add_argument("--adapter", type=Path, help="a folder of `make`, laid over SmolLM2 in the place of --model")
    parser.add_argument("--level", choices=COIN_COLLECTOR.levels, default="hard")
    parser.add_argument(
        "--seeds", choices=("dev", "level", "test", "unseen"), default="dev", help="test: for the model card alone"
    )
    parser.add_argument("--houses", type=int, default=40)
    parser.add_argument("--disguise", type=int, default=0, help="number of the houses' disguise; 0: as they are")
    parser.add_argument("--only", choices=("alone", "true"), help="without notes alone, or beside that one true note")
    parser.add_argument("--output", type=Path, help="all numbers as JSON")
    arguments = parser.parse_args()

    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = resolve_model(SMOLLM2 if arguments.adapter else arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=fast_dtype())
    if arguments.adapter:
        model = PeftModel.from_pretrained(model, arguments.adapter).merge_and_unload()
    seeds = SEEDS | {"unseen": COIN_COLLECTOR.panel(arguments.level)["unseen"]}
    houses = first(seeds[arguments.seeds], arguments.level, arguments.houses, arguments.disguise)
    level, reflection = COIN_COLLECTOR.levels[arguments.level], load_settings("cpu", file=WORLD).reflection
    trial = Trial(model, tokenizer, houses, level.max_steps, reflection)
    trial.alone(repeats=8)
    if arguments.only is None:
        trial.chain(rounds=8)
    if arguments.only != "alone":
        trial.true(repeats=2)
    if arguments.only is None:
        trial.strange(repeats=2)
        for count in (1, 4, 8):
            trial.failures(count, repeats=2)
    if arguments.output:
        cells = {name: measured(episodes) for name, episodes in trial.episodes.items()}
        table = {name: {key: cell and asdict(cell) for key, cell in row.items()} for name, row in cells.items()}
        arguments.output.write_text(
            json.dumps({"level": asdict(level), "houses": len(houses), "cells": table}, indent=1)
        )


if __name__ == "__main__":
    main()
