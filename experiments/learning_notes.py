"""What the notes that episodes were shown said of the coin, whether it was true, and how often the coin was found."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empo2.agents.houses.games import COIN_COLLECTOR
from empo2.agents.houses.house import House
from empo2.memory.browse import plays, stored_tips
from empo2.memory.file import reading
from empo2.small_model.notes import COIN, parse

KINDS = ("the coin, true", "the coin, true and false", "the coin, false", "no coin")
"""What an episode's notes say of the coin's place: right ones alone, both, wrong ones alone, nothing."""
_BY_TRUTHS = dict(zip(map(frozenset, ([True], [True, False], [False], [])), KINDS, strict=True))

type Outcomes = dict[str, list[int]]
"""By kind of notes: [episodes with the coin found, episodes]."""


def training_houses(rows: Sequence[Mapping[str, Any]]) -> dict[int, House]:
    """Return CoinCollector's houses by their seeds, as players of the tasks see them."""
    return {row["seed"]: COIN_COLLECTOR.house(row["level"], row["seed"], row["disguise"]) for row in rows}


def outcomes_by_notes(memory: Path, houses: Mapping[int, House]) -> Outcomes:
    """Return how often the coin was found in the training episodes that were to have notes, by what those said.

    Notes that the memory has dropped since count as absent; here it drops none.

    Raises:
        MemoryFileError: the file cannot be read.
    """
    with reading(memory) as db:
        said = {tip.id: _said(tip.text, houses[_seed(tip.scope)]) for tip in stored_tips(db, order="newest")}
        shown: defaultdict[str, set[bool]] = defaultdict(set)
        for episode, tip in db.execute("SELECT episode, tip_id FROM credits"):
            if (true := said.get(tip)) is not None:
                shown[episode].add(true)
        found = plays(db)
    outcomes = {kind: [0, 0] for kind in KINDS}
    for play in found:
        counts = outcomes[_BY_TRUTHS[frozenset(shown[play.episode])]]
        counts[0] += bool(play.success)
        counts[1] += 1
    return outcomes


def true_notes(memory: Path, houses: Mapping[int, House]) -> list[int]:
    """Return of a memory's notes [true ones, all]."""
    with reading(memory) as db:
        tips = list(stored_tips(db, order="newest"))
    notes = [(parse(tip.text), houses[_seed(tip.scope)]) for tip in tips]
    return [sum(note is not None and note.true_of(house) for note, house in notes), len(notes)]


def _seed(scope: str) -> int:
    return json.loads(scope)["seed"]


def _said(text: str, house: House) -> bool | None:
    """Return whether a note of the coin's place is true; None for any other note."""
    if not text.startswith(COIN):
        return None
    note = parse(text)
    return note is not None and note.true_of(house)
