"""Tips, the states that they are found by, and visited states: in an SQLite file, with an index in RAM."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from empo2.memory.file import copy_memory_file, load_entries, load_states, open_memory_file
from empo2.memory.index import ColumnTable, cosine_similarities, unit
from empo2.memory.novelty import count_visit
from empo2.memory.retrieval import best_by_score


@dataclass(frozen=True)
class Step:
    """One step of an episode: the state met, its embedding [dimension], and the action taken there."""

    state: str
    key: np.ndarray
    action: str


@dataclass(frozen=True)
class Tip:
    """A tip found for a state. `action` is what its episode did in the stored state most similar to that one."""

    id: int
    episode: str
    text: str
    action: str
    score: float
    success: bool | None
    similarity: float


class MemoryStore:
    """Tips and visited states of any number of scopes, in one SQLite file.

    A scope is a free string (say, a task and its variation); nothing crosses from one to another. Every call
    that returns has been committed: in WAL mode with synchronous=NORMAL a killed process loses nothing, and
    only a power loss can cost the last commits (never the file).

    To be created and used in one thread, by one process at a time; others may read the file meanwhile.

    Args:
        path: the file, created if absent.
        embedder: name of the model that makes the keys; keys of two models cannot be compared.
        dimension: length of a key.
        capacity: most entries (steps) per scope; the oldest give way.

    Raises:
        MemoryFileError: not a memory file, of a newer schema, or written with another embedder or dimension.
    """

    def __init__(self, path: str | Path, *, embedder: str, dimension: int, capacity: int = 1000):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1 entry per scope")
        self._path = Path(path)
        self._dimension = dimension
        self._capacity = capacity
        self._db = open_memory_file(self._path, embedder=embedder, dimension=dimension)
        self._entries: dict[str, ColumnTable] = {}
        self._states: dict[str, ColumnTable] = {}

    def add_episode(
        self, scope: str, episode: str, *, tip: str, score: float, success: bool | None, steps: Sequence[Step]
    ) -> int:
        """Store an episode's tip under each of its steps, and return how many entries that made.

        A step equal to a stored entry in scope, tip, state, action and score is left out, as in the paper
        (arXiv 2602.23008); an episode that is stored already is left alone (returns 0).

        Raises:
            ValueError: an empty tip, a score that is not finite, or an unusable key. Nothing is stored then.
        """
        if not tip.strip():
            raise ValueError(f"tip of episode {episode!r} is empty: {tip!r}")
        score = float(score)  # SQLite does not take numpy's float32
        if not math.isfinite(score):
            raise ValueError(f"score of episode {episode!r} is {score}; it must be finite")
        keys = [unit(step.key, self._dimension) for step in steps]
        if self._db.execute("SELECT 1 FROM tips WHERE episode = ?", (episode,)).fetchone():
            return 0
        seen = set(
            self._db.execute(
                "SELECT state, action FROM entries JOIN tips ON tips.id = tip_id"
                " WHERE scope = ? AND text = ? AND score = ?",
                (scope, tip, score),
            )
        )
        fresh: dict[tuple[str, str], int] = {}
        for number, step in enumerate(steps):
            if (step.state, step.action) not in seen:
                fresh.setdefault((step.state, step.action), number)
        numbers = list(fresh.values())[-self._capacity :]
        if not numbers:
            return 0

        index = self._entry_index(scope)
        excess = max(0, len(index) + len(numbers) - self._capacity)
        with self._db:
            tip_id = self._insert(
                "INSERT INTO tips (scope, episode, text, score, success, created) VALUES (?, ?, ?, ?, ?, ?)",
                (scope, episode, tip, score, success, time.time()),
            )
            ids = [
                self._insert(
                    "INSERT INTO entries (tip_id, step, action, state, key) VALUES (?, ?, ?, ?, ?)",
                    (tip_id, number, steps[number].action, steps[number].state, keys[number].tobytes()),
                )
                for number in numbers
            ]
            self._db.executemany("DELETE FROM entries WHERE id = ?", [(int(i),) for i in index["id"][:excess]])
            self._db.execute(
                "DELETE FROM tips WHERE scope = ? AND NOT EXISTS (SELECT 1 FROM entries WHERE tip_id = tips.id)",
                (scope,),
            )
        # RAM follows the file, never the other way round: a failed commit leaves both as they were.
        index.drop_oldest(excess)
        for entry_id, number in zip(ids, numbers, strict=True):
            index.append(id=entry_id, key=keys[number], score=score, text=hash(tip))
        return len(numbers)

    def search(self, scope: str, key: np.ndarray, *, k: int = 10, min_similarity: float = 0.5) -> list[Tip]:
        """The scope's tips for a state, best score first; see `retrieval.best_by_score` for the exact order.

        Args:
            key: embedding of the current state, [dimension].
            min_similarity: cosine that an entry must exceed.

        Raises:
            ValueError: an unusable key.
        """
        index = self._entry_index(scope)
        similarities = cosine_similarities(index["key"], unit(key, self._dimension))
        rows = best_by_score(similarities, index["score"], index["text"], k=k, min_similarity=min_similarity)
        return [self._tip(int(index["id"][row]), float(similarities[row])) for row in rows]

    def visit(self, scope: str, state: str, key: np.ndarray, *, threshold: float) -> int:
        """Count a visit to a state and return n >= 1, for the intrinsic reward 1/n; see `novelty.count_visit`.

        Args:
            key: embedding of the state, [dimension].
            threshold: cosine above which two states count as similar.

        Raises:
            ValueError: an unusable key.
        """
        key = unit(key, self._dimension)
        index = self._state_index(scope)
        row, count = count_visit(cosine_similarities(index["key"], key), index["visits"], threshold=threshold)
        if row is None:
            with self._db:
                state_id = self._insert(
                    "INSERT INTO states (scope, state, key, visits) VALUES (?, ?, ?, 1)", (scope, state, key.tobytes())
                )
            index.append(id=state_id, key=key, visits=1)
        else:
            with self._db:
                self._db.execute("UPDATE states SET visits = visits + 1 WHERE id = ?", (int(index["id"][row]),))
            index["visits"][row] += 1
        return count

    def size(self, scope: str | None = None) -> int:
        """Number of tips, of one scope or of all."""
        return self._count("SELECT count(*) FROM tips", scope)

    def entries(self, scope: str | None = None) -> int:
        """Number of entries (steps that tips are found by), of one scope or of all."""
        return self._count("SELECT count(*) FROM entries JOIN tips ON tips.id = tip_id", scope)

    def scopes(self) -> list[str]:
        """The scopes that hold tips, sorted."""
        return [scope for (scope,) in self._db.execute("SELECT DISTINCT scope FROM tips ORDER BY scope")]

    def snapshot(self, path: str | Path) -> None:
        """Copy the memory as it is now to another file, which is replaced at one stroke if it exists.

        A snapshot is a memory file. To go back to it, open it and snapshot it onto the old file: unlike
        copying files, this cannot leave the old file's write-ahead log to be replayed into the new one.
        """
        if Path(path).resolve() == self._path.resolve():
            raise ValueError(f"{path} is the open memory file itself; a snapshot needs another path")
        copy_memory_file(self._db, Path(path))

    def close(self) -> None:
        self._db.close()

    def _insert(self, statement: str, values: tuple) -> int:
        row_id = self._db.execute(statement, values).lastrowid
        assert row_id is not None  # it is None only before the first INSERT
        return row_id

    def _count(self, query: str, scope: str | None) -> int:
        where, values = ("", ()) if scope is None else (" WHERE scope = ?", (scope,))
        return self._db.execute(query + where, values).fetchone()[0]

    def _tip(self, entry_id: int, similarity: float) -> Tip:
        tip_id, episode, text, action, score, success = self._db.execute(
            "SELECT tips.id, episode, text, action, score, success FROM entries JOIN tips ON tips.id = tip_id"
            " WHERE entries.id = ?",
            (entry_id,),
        ).fetchone()
        return Tip(tip_id, episode, text, action, score, None if success is None else bool(success), similarity)

    def _entry_index(self, scope: str) -> ColumnTable:
        if scope not in self._entries:
            self._entries[scope] = load_entries(self._db, scope, self._dimension)
        return self._entries[scope]

    def _state_index(self, scope: str) -> ColumnTable:
        if scope not in self._states:
            self._states[scope] = load_states(self._db, scope, self._dimension)
        return self._states[scope]
