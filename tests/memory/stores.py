"""Stores whose keys have three dimensions, and what tests put into them."""

import math
import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from empo2.memory import MemoryStore, NewPlay, Step, Visit

EAST, NORTH, UP = np.eye(3, dtype=np.float32)
BETWEEN = (EAST + NORTH) / math.sqrt(2)  # cosine 0.707 to both


def open_store(path: str | Path, **changes: Any) -> MemoryStore:
    return MemoryStore(path, **({"embedder": "compass", "dimension": 3} | changes))


def add(store: MemoryStore, episode: str, *steps: Any, scope: str = "task", **given: Any) -> int | None:
    """Store an episode whose steps are keys, or tuples of state, key and action, of which the action may be absent."""
    met = [step if isinstance(step, tuple) else (f"s{number}", step) for number, step in enumerate(steps)]
    made = [Step(state, key, *action or ["look"]) for state, key, *action in met]
    given = {"tip": f"tip of {episode}", "score": 1.0, "success": None} | given
    return store.add_episode(scope, episode, steps=made, **given)


def play(
    store: MemoryStore,
    episode: str,
    shown: Mapping[int, int] | Collection[int] = (),
    *,
    scope: str = "task",
    score: float = 1.0,
    learning_rate: float = 0.5,
    **given: Any,
) -> None:
    """Record a play that was shown these tips, each in one turn unless the turns are given; its reward is the score."""
    turns = shown if isinstance(shown, Mapping) else dict.fromkeys(shown, 1)
    given = {"success": None, "searches": 1, "hits": 1, "reward": score} | given
    store.record_play(NewPlay(scope, episode, score=score, shown=turns, **given), learning_rate=learning_rate)


def visit(store: MemoryStore, scope: str, state: str, key: np.ndarray, *, threshold: float) -> int:
    """Count a visit and commit it at once; return n, the number of similar visits with this one."""
    before = store.states.count([visited := Visit(scope, state, key)], threshold=threshold)[0]
    store.states.add_visits([visited], threshold=threshold)
    return before + 1


def rows(path: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


def sizes(path: Path) -> dict[str, tuple[int, int]]:
    query = "SELECT scope, count(DISTINCT tips.id), count(*) FROM tips JOIN entries ON tips.id = tip_id GROUP BY scope"
    return {scope: (tips, entries) for scope, tips, entries in rows(path, query)}
