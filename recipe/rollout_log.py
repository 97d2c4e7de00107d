"""The rollouts of a run's last steps, as they were played, and why rollouts were dropped: an SQLite file.

The trainer writes it once a step; `empo2 show` and the end of a run read it.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from empo2.recipe.errors import Empo2Error
from empo2.recipe.redaction import redacted

KEPT_STEPS = 10  # of 128 rollouts with 30 turns each: 11 MB, ten times that of chats that are written anew each turn

type Phase = Literal["training", "validation"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    number INTEGER PRIMARY KEY, id TEXT, step INTEGER, phase TEXT, mode TEXT, return REAL, intrinsic REAL,
    advantage REAL, turns INTEGER, tips INTEGER, dropped TEXT, played BLOB
);
CREATE INDEX IF NOT EXISTS by_step ON rollouts (step);
CREATE TABLE IF NOT EXISTS dropped (
    step INTEGER, phase TEXT, reason TEXT, cause TEXT, example TEXT, rollout TEXT, count INTEGER,
    PRIMARY KEY (step, phase, reason, cause)
);
"""


@dataclass(frozen=True)
class LoggedRollout:
    """A rollout as it was played, and what became of it.

    Attributes:
        id: agent-lightning's.
        mode: ``memory, off-policy``, ``memory, on-policy`` or ``no memory``.
        return_: the environment's, None if the agent reported none.
        intrinsic: sum of 1/n over the calls.
        advantage: None if it was not trained on.
        turns: number of model calls.
        tips: number of different tips that it was shown.
        dropped: why it was not used, such as ``failed_by_agent``; None if it was.
        cause: what the failures with the same cause share; "" for none.
        example: the cause in this rollout's words.
        played: what `empo2 show` prints: task, calls, error. JSON-like.
    """

    id: str
    step: int
    phase: Phase
    mode: str
    return_: float | None = None
    intrinsic: float = 0.0
    advantage: float | None = None
    turns: int = 0
    tips: int = 0
    dropped: str | None = None
    cause: str = ""
    example: str = ""
    played: Mapping[str, Any] = field(default_factory=dict)


_COLUMNS = ("id", "step", "phase", "mode", "return", "intrinsic", "advantage", "turns", "tips", "dropped")
_FIELDS = [field.name for field in fields(LoggedRollout)][: len(_COLUMNS)]


@dataclass(frozen=True)
class Dropped:
    """Rollouts that were dropped for the same reason and cause.

    Attributes:
        example: the cause in the words of the first of them.
        rollout: the latest of them.
        count: in all steps from ``first`` to ``last``.
    """

    reason: str
    cause: str
    example: str
    rollout: str
    count: int
    first: int
    last: int

    def told(self, run: Path) -> str:
        """Return it in one line, with the command that shows the latest of these rollouts."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        why = f"{self.reason.replace('_', ' ')}: {self.example}" if self.example else self.reason.replace("_", " ")
        return f"{self.count} of {steps}, {why}; empo2 show {run} {self.rollout[:8]}"


def write_rollouts(file: Path, rollouts: Sequence[LoggedRollout]) -> None:
    """Add rollouts of one step, without secrets; of steps before the last ten only why rollouts were dropped is kept.

    Raises:
        sqlite3.Error: the file cannot be written.
    """
    if not rollouts:
        return
    dropped = []
    for each in rollouts:
        if each.dropped:
            cause, example = redacted({"cause": each.cause, "text": each.example}).values()
            dropped.append((each.step, each.phase, each.dropped, cause, example, each.id))
    with closing(sqlite3.connect(file, timeout=30)) as db, db:
        db.executescript(_SCHEMA)
        db.executemany(
            f"INSERT INTO rollouts ({', '.join(_COLUMNS)}, played) VALUES (?{', ?' * len(_COLUMNS)})",
            [(*(getattr(each, name) for name in _FIELDS), _compressed(each.played)) for each in rollouts],
        )
        db.executemany(
            "INSERT INTO dropped VALUES (?, ?, ?, ?, ?, ?, 1)"
            " ON CONFLICT DO UPDATE SET count = count + 1, rollout = excluded.rollout",
            dropped,
        )
        db.execute("DELETE FROM rollouts WHERE step <= (SELECT max(step) FROM rollouts) - ?", (KEPT_STEPS,))


def _compressed(played: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(redacted(played), ensure_ascii=False, default=str).encode())


@contextmanager
def _reading(file: Path) -> Iterator[sqlite3.Connection]:
    if not file.is_file():
        raise Empo2Error(f"{file}: there is no such file; training writes it when the rollouts of a step have ended")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            yield db
    except sqlite3.Error as error:
        raise Empo2Error(f"{file}: cannot be read: {error}") from None


def read_rollouts(file: Path, prefix: str = "", step: int | None = None) -> list[LoggedRollout]:
    """Return the rollouts whose ids begin with ``prefix``, of one step or all, in the order of their steps.

    ``played`` is left out; see `read_played`.

    Raises:
        Empo2Error: there is no file, or it cannot be read.
    """
    with _reading(file) as db:
        rows = db.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM rollouts"
            " WHERE substr(id, 1, length(:prefix)) = :prefix AND (:step IS NULL OR step = :step)"
            " ORDER BY step, number",
            {"prefix": prefix, "step": step},
        )
        return [LoggedRollout(*row) for row in rows]


def read_played(file: Path, rollout_id: str) -> dict[str, Any]:
    """Return what was played in a rollout.

    Raises:
        Empo2Error: there is no file, or it cannot be read.
    """
    with _reading(file) as db:
        (played,) = db.execute(
            "SELECT played FROM rollouts WHERE id = ? ORDER BY number DESC", (rollout_id,)
        ).fetchone()
    return json.loads(zlib.decompress(played))


def read_dropped(file: Path, step: int | None = None) -> list[Dropped]:
    """Return why rollouts were dropped, in one step or the whole run, most frequent first; no file is no drop.

    Raises:
        Empo2Error: the file cannot be read.
    """
    if not file.is_file():
        return []
    with _reading(file) as db:
        rows = db.execute(
            "SELECT reason, cause, example, rollout, count, step, step FROM dropped"
            " WHERE :step IS NULL OR step = :step ORDER BY step",
            {"step": step},
        )
        found: dict[tuple[str, str], Dropped] = {}
        for each in (Dropped(*row) for row in rows):
            before = found.get((each.reason, each.cause), replace(each, count=0))
            counted = replace(before, rollout=each.rollout, count=before.count + each.count, last=each.last)
            found[each.reason, each.cause] = counted
    return sorted(found.values(), key=lambda dropped: -dropped.count)
