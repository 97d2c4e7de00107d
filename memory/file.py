"""The memory file: its tables, how it is opened or refused, read into RAM and copied."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

from empo2.memory.index import ColumnTable

SCHEMA_VERSION = 1
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL);
CREATE TABLE tips (
    id INTEGER PRIMARY KEY, scope TEXT NOT NULL, episode TEXT NOT NULL UNIQUE, text TEXT NOT NULL,
    score REAL NOT NULL, success INTEGER, created REAL NOT NULL  -- Unix time, seconds
);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, tip_id INTEGER NOT NULL REFERENCES tips (id), step INTEGER NOT NULL,
    action TEXT NOT NULL, state TEXT NOT NULL, key BLOB NOT NULL  -- float32 [dimension], unit norm
);
CREATE TABLE states (
    id INTEGER PRIMARY KEY, scope TEXT NOT NULL, state TEXT NOT NULL, key BLOB NOT NULL, visits INTEGER NOT NULL
);
CREATE INDEX tips_by_scope ON tips (scope);
CREATE INDEX entries_by_tip ON entries (tip_id);
CREATE INDEX states_by_scope ON states (scope);
"""


class MemoryFileError(Exception):
    """A memory file that cannot be used as asked; the message names the file and says why."""


def open_memory_file(path: Path, *, embedder: str, dimension: int) -> sqlite3.Connection:
    """Open a memory file, created if absent or empty, for this thread.

    Every commit outlives the process (WAL, synchronous=NORMAL); a power loss can cost the last commits.

    Raises:
        MemoryFileError: see `MemoryStore`.
    """
    db = None
    try:
        db = sqlite3.connect(path)
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            _create(db, embedder, dimension)
        _check(db, path, embedder, dimension)
        # Only now, because it writes to the file, which could have been anybody's.
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
    except (sqlite3.Error, MemoryFileError) as error:
        if db is not None:
            db.close()
        if isinstance(error, MemoryFileError):
            raise
        raise MemoryFileError(f"{path}: cannot be opened as a memory file: {error}") from error
    return db


def load_entries(db: sqlite3.Connection, scope: str, dimension: int) -> ColumnTable:
    """The scope's entries, oldest first: id, key [dimension], score, and `text`, equal where tip texts are equal."""
    rows = db.execute(
        "SELECT entries.id, key, score, text FROM entries JOIN tips ON tips.id = tip_id"
        " WHERE scope = ? ORDER BY entries.id",
        (scope,),
    ).fetchall()
    return ColumnTable(
        id=np.array([row[0] for row in rows], np.int64),
        key=_matrix([row[1] for row in rows], dimension),
        score=np.array([row[2] for row in rows], np.float64),
        text=np.array([hash(row[3]) for row in rows], np.int64),
    )


def load_states(db: sqlite3.Connection, scope: str, dimension: int) -> ColumnTable:
    """The scope's visited states, oldest first: id, key [dimension] and visits."""
    query = "SELECT id, key, visits FROM states WHERE scope = ? ORDER BY id"
    rows = db.execute(query, (scope,)).fetchall()
    return ColumnTable(
        id=np.array([row[0] for row in rows], np.int64),
        key=_matrix([row[1] for row in rows], dimension),
        visits=np.array([row[2] for row in rows], np.int64),
    )


def copy_memory_file(db: sqlite3.Connection, path: Path) -> None:
    """Put a consistent copy of an open memory file at `path`, in place of any file there, at one stroke."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with closing(sqlite3.connect(temporary)) as copy:
        db.backup(copy)
    # What a killed process left beside an older file at `path` would be replayed into the new one.
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.replace(temporary, path)


def _matrix(blobs: list[bytes], dimension: int) -> np.ndarray:
    return np.frombuffer(b"".join(blobs), np.float32).reshape(-1, dimension)


def _create(db: sqlite3.Connection, embedder: str, dimension: int) -> None:
    with db:
        db.executescript("BEGIN;" + _TABLES)  # one transaction: a half-made file cannot exist
        meta = {"schema": SCHEMA_VERSION, "embedder": embedder, "dimension": dimension}
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())


def _check(db: sqlite3.Connection, path: Path, embedder: str, dimension: int) -> None:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        raise MemoryFileError(f"{path}: an SQLite file, but not a memory file (it has no table 'meta')")
    meta = dict(db.execute("SELECT key, value FROM meta"))
    if meta.get("schema") != SCHEMA_VERSION:
        raise MemoryFileError(
            f"{path}: has memory schema {meta.get('schema')}; this version of empo2 reads schema {SCHEMA_VERSION}"
        )
    if (meta["embedder"], meta["dimension"]) != (embedder, dimension):
        raise MemoryFileError(
            f"{path}: was written with embedder {meta['embedder']!r} ({meta['dimension']} dimensions), but the"
            f" embedder is now {embedder!r} ({dimension}); their keys cannot be compared:"
            " use that embedder again or another memory file"
        )
