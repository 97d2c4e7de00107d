"""The memory file: its tables; open, lock, check, copy and restore it."""

import fcntl
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

SCHEMA_VERSION = 2
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL);
CREATE TABLE tips (
    id INTEGER PRIMARY KEY AUTOINCREMENT, scope TEXT NOT NULL, episode TEXT NOT NULL UNIQUE, text TEXT NOT NULL,
    score REAL NOT NULL, success INTEGER, created REAL NOT NULL,  -- Unix time, seconds
    value REAL NOT NULL DEFAULT 0  -- learned value Q
);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, tip_id INTEGER NOT NULL REFERENCES tips (id), step INTEGER NOT NULL,
    action TEXT NOT NULL, state TEXT NOT NULL, key BLOB NOT NULL  -- float32 [dimension], unit norm
);
CREATE TABLE states (
    id INTEGER PRIMARY KEY, scope TEXT NOT NULL, state TEXT NOT NULL, key BLOB NOT NULL, visits INTEGER NOT NULL
);
CREATE TABLE plays (  -- an episode that tips were looked up for
    episode TEXT PRIMARY KEY, scope TEXT NOT NULL, score REAL NOT NULL, success INTEGER,
    searches INTEGER NOT NULL, hits INTEGER NOT NULL, created REAL NOT NULL  -- Unix time, seconds
);
CREATE TABLE credits (  -- which tips an episode was shown, in how many turns; tips that were dropped keep theirs
    episode TEXT NOT NULL REFERENCES plays (episode), tip_id INTEGER NOT NULL, turns INTEGER NOT NULL,
    PRIMARY KEY (episode, tip_id)
) WITHOUT ROWID;
CREATE INDEX tips_by_scope ON tips (scope);
CREATE INDEX entries_by_tip ON entries (tip_id);
CREATE INDEX states_by_scope ON states (scope);
CREATE INDEX credits_by_tip ON credits (tip_id);
"""
_TYPES = {  # of the columns; "" is not checked
    "tips": dict.fromkeys(("scope", "episode", "text"), "text")
    | dict.fromkeys(("score", "created", "value"), "real")
    | {"id": "", "success": ""},
    "entries": {"id": "", "tip_id": "integer", "step": "integer", "action": "text", "state": "text", "key": ""},
    "states": {"id": "", "scope": "text", "state": "text", "key": "", "visits": "integer"},
    "plays": {"episode": "text", "scope": "text", "score": "real", "created": "real"}
    | {"success": "", "searches": "integer", "hits": "integer"},
    "credits": {"episode": "text", "tip_id": "integer", "turns": "integer"},
}


class MemoryFileError(Exception):
    """A memory file that cannot be used as asked; the message names the file and says why."""


def open_memory_file(path: Path, *, embedder: str, dimension: int) -> tuple[sqlite3.Connection, TextIO | None]:
    """Open a memory file for writing, created if absent or empty, and lock it against other writers.

    Every commit outlives the process (WAL, synchronous=NORMAL); a power loss can cost the last commits. `MemoryStore`
    says what is refused.

    Returns:
        The connection, for this thread, and the lock, which is held until it is closed (None for ":memory:").
    """
    in_file = str(path) != ":memory:"
    with ExitStack() as opened:  # closes what was opened, if something fails
        try:
            _check_kind(path)
            if in_file:
                _create_private(path)
            db = opened.enter_context(closing(sqlite3.connect(path)))
            db.text_factory = _decoded
            if not _is_empty(db):  # before anything is written beside a file that may not be ours
                _check_embedder(read_meta(db, path), path, embedder, dimension)
            lock = opened.enter_context(_lock(path)) if in_file else None
            if _is_empty(db):
                _create(db, embedder, dimension)
            _check_embedder(read_meta(db, path), path, embedder, dimension)
            _check_pages(db, path)
            _check_values(db, path)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:  # SQLite's own messages may be damaged, too
            raise MemoryFileError(f"{path}: cannot be opened as a memory file: {error}") from error
        opened.pop_all()
        return db, lock


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection on which all queries see the memory file as it is now, even while a run writes to it.

    It does not block the writer. The file may be of any embedder.

    Raises:
        MemoryFileError: no such file, not a memory file, of another schema, or damaged.
    """
    with _reading_meta(path) as db:
        db.execute("BEGIN")
        _check_values(db, path)
        yield db


@contextmanager
def _reading_meta(path: Path) -> Iterator[sqlite3.Connection]:
    _check_kind(path)
    if not path.exists():
        raise MemoryFileError(f"{path}: there is no such file")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        if not os.access(path.absolute().parent, os.W_OK) and not _beside(path, "-wal").exists():
            uri += "&immutable=1"  # else a file in WAL mode could not be read there
        with closing(sqlite3.connect(uri, uri=True)) as db:
            db.text_factory = _decoded
            read_meta(db, path)
            yield db
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise MemoryFileError(f"{path}: cannot be read as a memory file: {error}") from error


def read_meta(db: sqlite3.Connection, path: Path) -> dict[str, Any]:
    """Return the file's metadata: schema, embedder (name of the model) and dimension (of its keys).

    Raises:
        MemoryFileError: not a memory file, or of another schema.
    """
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        raise MemoryFileError(f"{path}: an SQLite file, but not a memory file (it has no table 'meta')")
    meta = dict(db.execute("SELECT key, value FROM meta"))
    if meta.get("schema") != SCHEMA_VERSION:
        raise MemoryFileError(
            f"{path}: has memory schema {meta.get('schema')}; this version of empo2 reads schema {SCHEMA_VERSION}:"
            " use the version that wrote it, or another memory file"
        )
    if not (isinstance(meta.get("embedder"), str) and isinstance(meta.get("dimension"), int)):
        raise _damaged(path, "its table 'meta' lacks embedder or dimension")
    return meta


def check_memory(path: Path) -> None:
    """Read all of a memory file; raise as `reading` if it is damaged."""
    with reading(path) as db:
        _check_pages(db, path)


def copy_memory(source: Path, target: Path) -> None:
    """Put a consistent copy of a memory file, which may be in use by another process, at a new path.

    Raises:
        MemoryFileError: `source` is not a memory file or of another schema, `target` exists, or the copy failed;
            nothing is left at `target` then.
    """
    if target.exists():
        raise MemoryFileError(f"{target}: exists already; give a new path for the copy of {source}")
    with reading(source) as db:
        try:
            copy_memory_file(db, target)
        except (sqlite3.Error, OSError) as error:
            raise MemoryFileError(f"{source}: cannot be copied to {target}: {error}") from error


def copy_memory_file(db: sqlite3.Connection, path: Path) -> None:
    """Put a consistent copy of an open memory file at `path`, atomically replacing a memory file there.

    Raises:
        MemoryFileError: something at `path` is not a memory file; it is left as it is.
    """
    if os.path.lexists(path):
        with _reading_meta(path):  # a damaged one can be replaced
            pass
    temporary = _beside(path, ".tmp")
    _remove(temporary)  # left by a killed process
    try:
        _create_private(temporary)
        with closing(sqlite3.connect(temporary)) as copy:
            db.backup(copy)
            # Not WAL as in the original, so that the copy is one file and can be read in a read-only folder.
            copy.execute("PRAGMA journal_mode = DELETE")
        # A journal that a killed process left beside an older file at `path` would be replayed into the new one.
        for suffix in ("-wal", "-shm", "-journal"):
            _beside(path, suffix).unlink(missing_ok=True)
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def restore_memory_file(db: sqlite3.Connection, path: Path, snapshot: Path) -> None:
    """Make the content of the memory file `db`, open at `path`, that of a snapshot, in one transaction.

    Rows are copied one by one, so that tip ids continue from where they were and are never reused.

    Raises:
        MemoryFileError: the snapshot cannot be used; nothing has changed then.
    """
    meta = read_meta(db, path)
    with reading(snapshot) as reader:
        _check_embedder(read_meta(reader, snapshot), snapshot, meta["embedder"], meta["dimension"])
    try:
        db.execute("ATTACH ? AS snapshot", (str(snapshot.absolute()),))
        try:
            with db:
                for table in ("credits", "plays", "entries", "tips", "states"):
                    db.execute(f"DELETE FROM main.{table}")
                    db.execute(f"INSERT INTO main.{table} SELECT * FROM snapshot.{table}")
        finally:
            db.execute("DETACH snapshot")
    except sqlite3.Error as error:
        raise MemoryFileError(f"{snapshot}: cannot be restored to {path}: {error}") from error


def _check_kind(path: Path) -> None:
    """Refuse what is there but not a file: to open a pipe would wait for whoever writes to it."""
    if path.exists() and not path.is_file():
        raise MemoryFileError(f"{path}: is not a file; give the path of a memory file")


def _check_pages(db: sqlite3.Connection, path: Path) -> None:
    (result,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if result != "ok":
        raise _damaged(path, " ".join(result.split()))


def _check_values(db: sqlite3.Connection, path: Path) -> None:
    """Refuse values of other types than the columns': SQLite takes any, and one fails all searches of its scope."""
    for table, columns in _TYPES.items():
        wrong = [f"typeof({column}) <> '{kind}'" for column, kind in columns.items() if kind]
        wrong += [f"abs({column}) > {sys.float_info.max!r}" for column, kind in columns.items() if kind == "real"]
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE {' OR '.join(wrong)} LIMIT 1"
        if found := db.execute(query).fetchone():
            raise _damaged(path, f"the table {table!r} holds {found!r:.200}")


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")  # one damaged letter is no reason to lose all tips


def _damaged(path: Path, how: str) -> MemoryFileError:
    return MemoryFileError(f"{path}: is damaged ({how}); use a snapshot of it, from a checkpoint, in its place")


def _check_embedder(meta: dict[str, Any], path: Path, embedder: str, dimension: int) -> None:
    if (meta["embedder"], meta["dimension"]) != (embedder, dimension):
        raise MemoryFileError(
            f"{path}: was written with embedder {meta['embedder']!r} ({meta['dimension']} dimensions), but the"
            f" embedder is now {embedder!r} ({dimension}); their keys cannot be compared: use that embedder again,"
            " another memory file, or embed it anew with `empo2 memory export` and `empo2 memory import`"
        )


def _is_empty(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master").fetchone() is None


def _create(db: sqlite3.Connection, embedder: str, dimension: int) -> None:
    with db:
        db.executescript("BEGIN;" + _TABLES)  # one transaction: a half-made file cannot exist
        meta = {"schema": SCHEMA_VERSION, "embedder": embedder, "dimension": dimension}
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())


def _lock(path: Path) -> TextIO:
    """Return a lock that is held while it is open; the system releases the lock of a killed process."""
    _create_private(beside := _beside(path.resolve(), ".lock"))
    lock = beside.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            owner = lock.read().strip()
        raise MemoryFileError(
            f"{path}: is in use by another process (pid {owner}); stop that first, or use another memory file"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _create_private(path: Path) -> None:
    """Create a file that only its owner can read. SQLite gives the files beside it the same mode.

    A file that exists is not opened: closing it would drop the locks of this process's connections to it.
    """
    with suppress(OSError):  # SQLite says what is wrong
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        _beside(path, suffix).unlink(missing_ok=True)
