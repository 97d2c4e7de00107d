"""Tips, the states by which they are found, and visited states: an SQLite file with an index in RAM."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from empo2.memory.file import copy_memory_file, open_memory_file, restore_memory_file
from empo2.memory.index import ENTRIES, ColumnTable, cosine_similarities, load, unit
from empo2.memory.novelty import VisitedStates
from empo2.memory.retrieval import Entries, Policy

MAX_TIP_CHARACTERS = 12_000  # stored; a thousand words of twelve characters


@dataclass(frozen=True)
class Step:
    """One step of an episode: the state met, its embedding [dimension], and the action taken there."""

    state: str
    key: np.ndarray
    action: str


@dataclass(frozen=True)
class Tip:
    """A tip found for a state. `action` is the action of its episode in the stored state most similar to that one."""

    id: int
    episode: str
    text: str
    action: str
    score: float
    success: bool | None
    value: float
    similarity: float


@dataclass(frozen=True)
class NewPlay:
    """An episode for which tips were looked up."""

    scope: str
    episode: str
    score: float  # the environment's return
    success: bool | None
    searches: int  # turns for which tips were looked up
    hits: int  # turns for which some were found
    # Ids of the tips shown, each with the number of turns. Tips dropped since are recorded too.
    shown: Mapping[int, int]
    reward: float  # the return as the trainer scales it


class MemoryStore:
    """Tips and visited states of any number of scopes, in one SQLite file.

    A scope is any string (say, a task and its variation); scopes never mix. Every call that returns has been
    committed: in WAL mode with synchronous=NORMAL a killed process loses nothing, and a power loss can lose only
    the last commits, never the file.

    Create and use it in one thread. Until it is closed, `<file>.lock` locks the file against other writers; readers
    are not blocked.

    Each tip has a learned value Q, MemRL's utility of an entry (arXiv 2601.03192). In MemRL an entry is one
    experience with one intent; here one tip is found by several states, and Q belongs to the tip.

    Args:
        path: the file, created if absent.
        embedder: name of the model that makes the keys; keys of two models cannot be compared.
        dimension: length of a key.
        capacity: most entries (steps) per scope, at least 1; the oldest are dropped.

    Raises:
        MemoryFileError: not a memory file, of another schema, written with another embedder or dimension, or in use
            by another process.
    """

    def __init__(self, path: str | Path, *, embedder: str, dimension: int, capacity: int = 1000):
        self._path = Path(path)
        self._dimension = dimension
        self._capacity = capacity
        self._db, self._lock = open_memory_file(self._path, embedder=embedder, dimension=dimension)
        self._entries: dict[str, ColumnTable] = {}
        self.states = VisitedStates(self._db, dimension)

    def add_episode(
        self,
        scope: str,
        episode: str,
        *,
        tip: str,
        score: float,
        success: bool | None,
        steps: Sequence[Step],
        value: float = 0.0,
        created: float | None = None,
    ) -> int | None:
        """Store an episode's tip under each of its steps; return the tip's id, None if nothing is stored.

        A step equal to a stored entry in scope, tip, state, action and score is left out, as in the paper
        (arXiv 2602.23008); an episode that is already stored is not changed.

        Args:
            created: Unix time in seconds; None is now.

        Raises:
            ValueError: an empty or too long tip, a score or value that is not finite, or an unusable key. Nothing is
                stored then.
        """
        _check_text(f"tip of episode {episode!r}", tip)
        score, value = _finite(episode, "score", score), _finite(episode, "value", value)
        keys = [unit(step.key, self._dimension) for step in steps]
        if self._db.execute("SELECT 1 FROM tips WHERE episode = ?", (episode,)).fetchone():
            return None
        index = self._entry_index(scope)
        seen = self._steps_stored_with(index, tip, score)
        fresh: dict[tuple[str, str], int] = {}
        for number, step in enumerate(steps):
            if (step.state, step.action) not in seen:
                fresh.setdefault((step.state, step.action), number)
        numbers = list(fresh.values())[-self._capacity :]
        if not numbers:
            return None

        excess = max(0, len(index) + len(numbers) - self._capacity)
        # A tip's entries are adjacent, so only the last of these tips can keep some.
        emptied = set(index["tip"][:excess].tolist()) - set(index["tip"][excess : excess + 1].tolist())
        with self._db:
            (tip_id,) = self._db.execute(
                "INSERT INTO tips (scope, episode, text, score, success, created, value) VALUES (?, ?, ?, ?, ?, ?, ?)"
                " RETURNING id",
                (scope, episode, tip, score, success, time.time() if created is None else created, value),
            ).fetchone()
            ids = [
                self._db.execute(
                    "INSERT INTO entries (tip_id, step, action, state, key) VALUES (?, ?, ?, ?, ?) RETURNING id",
                    (tip_id, number, steps[number].action, steps[number].state, keys[number].tobytes()),
                ).fetchone()[0]
                for number in numbers
            ]
            self._delete("entries", "id", index["id"][:excess].tolist())
            self._delete("tips", "id", emptied)
        # RAM is changed only after the file, so a failed commit leaves both as they were.
        index.drop_oldest(excess)
        rows = {"id": ids, "key": [keys[number] for number in numbers]}
        index.append(len(ids), **rows, tip=tip_id, score=score, value=value, text=hash(tip))
        return tip_id

    def search(self, scope: str, key: np.ndarray, policy: Policy, *, exclude: Collection[str] = ()) -> list[Tip]:
        """Return the scope's tips for a state, chosen and ordered by the policy.

        Args:
            key: embedding of the current state, [dimension].
            exclude: texts of tips that the policy must not choose.

        Raises:
            ValueError: an unusable key.
        """
        index = self._entry_index(scope)
        # Of all, and then of those that are allowed: to copy their keys would take ten times as long.
        similarities = cosine_similarities(index["key"], unit(key, self._dimension))
        allowed = np.flatnonzero(~np.isin(index["text"], [hash(text) for text in exclude])) if exclude else slice(None)
        similarities, ids = similarities[allowed], index["id"][allowed]
        rows = policy(Entries(similarities, index["score"][allowed], index["value"][allowed], index["text"][allowed]))
        return [self._tip(int(ids[row]), float(similarities[row])) for row in rows]

    def record_play(self, play: NewPlay, *, learning_rate: float) -> None:
        """Record an episode, and update the value of each tip that it was shown.

        Q <- Q + learning_rate (reward - Q), MemRL's update (arXiv 2601.03192), once per episode, in however many turns
        the tip was shown. An episode that is already recorded is not changed.

        Raises:
            ValueError: a score or reward that is not finite. Nothing is stored then.
        """
        score, reward = _finite(play.episode, "score", play.score), _finite(play.episode, "reward", play.reward)
        updates: list[tuple[str, int, float]] = []
        with self._db:
            new = self._db.execute(
                "INSERT INTO plays VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (episode) DO NOTHING",
                (play.episode, play.scope, score, play.success, play.searches, play.hits, time.time()),
            ).rowcount
            if not new:
                return
            for tip, turns in play.shown.items():
                self._db.execute("INSERT INTO credits VALUES (?, ?, ?)", (play.episode, tip, turns))
                updates += self._db.execute(
                    "UPDATE tips SET value = value + ? * (? - value) WHERE id = ? RETURNING scope, id, value",
                    (learning_rate, reward, tip),
                ).fetchall()
        for tip_scope, tip, value in updates:
            if index := self._entries.get(tip_scope):
                first, end = np.searchsorted(index["tip"], [tip, tip + 1])
                index["value"][first:end] = value

    def texts(self, ids: Collection[int]) -> dict[int, str]:
        """Return the texts of tips by id, without those that are not stored."""
        query = "SELECT id, text FROM tips WHERE id = ?"
        return dict(row for tip in ids for row in self._db.execute(query, (tip,)))

    def revise(self, tip: int, text: str, score: float | None = None) -> None:
        """Give a tip another text, and another score if one is given; a tip that is not stored is not changed.

        Raises:
            ValueError: a text or score that `add_episode` would not take.
        """
        _check_text(f"revised tip {tip}", text)
        new = None if score is None else _finite(f"tip {tip}", "score", score)
        with self._db:
            query = "UPDATE tips SET text = ?, score = coalesce(?, score) WHERE id = ? RETURNING scope"
            scopes = self._db.execute(query, (text, new, tip)).fetchall()
        for index in (self._entries[scope] for (scope,) in scopes if scope in self._entries):
            rows = slice(*np.searchsorted(index["tip"], [tip, tip + 1]))
            index["text"][rows] = hash(text)
            if new is not None:
                index["score"][rows] = new

    def remove_tips(self, ids: Collection[int]) -> int:
        """Remove tips and their entries; return the number of tips removed. Their credits stay."""
        with self._db:
            self._delete("entries", "tip_id", ids)
            removed = self._delete("tips", "id", ids)
        for index in self._entries.values():
            index.drop("tip", ids)
        return removed

    def size(self) -> int:
        """Return the number of tips in all scopes."""
        return self._db.execute("SELECT count(*) FROM tips").fetchone()[0]

    def snapshot(self, path: str | Path) -> None:
        """Copy the memory as it is now to another memory file, which is replaced atomically if it exists."""
        copy_memory_file(self._db, self._other(path))

    def restore(self, path: str | Path) -> None:
        """Replace the content by that of a snapshot, in one transaction. Tip ids are never reused.

        Raises:
            MemoryFileError: the snapshot is not a memory file, of another schema, embedder or dimension, or damaged;
                nothing has changed then.
        """
        restore_memory_file(self._db, self._path, self._other(path))
        self._entries.clear()
        self.states.forget()

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def _other(self, path: str | Path) -> Path:
        if Path(path).resolve() == self._path.resolve():
            raise ValueError(f"{path} is the open memory file itself; a snapshot needs another path")
        return Path(path)

    def _steps_stored_with(self, index: ColumnTable, tip: str, score: float) -> set[tuple[str, str]]:
        """Return state and action of the entries with this tip's text and score."""
        alike = np.unique(index["tip"][(index["text"] == hash(tip)) & (index["score"] == score)])
        return {
            step
            for tip_id in alike.tolist()
            for step in self._db.execute(
                "SELECT state, action FROM entries JOIN tips ON tips.id = tip_id WHERE tip_id = ? AND text = ?",
                (tip_id, tip),
            )
        }

    def _delete(self, table: str, column: str, ids: Collection[int]) -> int:
        return self._db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(i,) for i in ids]).rowcount

    def _tip(self, entry_id: int, similarity: float) -> Tip:
        tip_id, episode, text, action, score, success, value = self._db.execute(
            "SELECT tips.id, episode, text, action, score, success, value FROM entries JOIN tips ON tips.id = tip_id"
            " WHERE entries.id = ?",
            (entry_id,),
        ).fetchone()
        success = None if success is None else bool(success)
        return Tip(tip_id, episode, text, action, score, success, value, similarity)

    def _entry_index(self, scope: str) -> ColumnTable:
        if scope not in self._entries:
            self._entries[scope] = load(self._db, ENTRIES, scope, self._dimension)
        return self._entries[scope]


def _check_text(what: str, text: str) -> None:
    if not text.strip():
        raise ValueError(f"{what} is empty: {text!r}")
    if len(text) > MAX_TIP_CHARACTERS:
        raise ValueError(f"{what} has {len(text)} characters; at most {MAX_TIP_CHARACTERS}")


def _finite(episode: str, name: str, value: float) -> float:
    number = float(value)  # SQLite does not accept numpy's float32
    if not math.isfinite(number):
        raise ValueError(f"{name} of episode {episode!r} is {number}; it must be finite")
    return number
