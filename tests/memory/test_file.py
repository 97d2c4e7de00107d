"""The memory file: refused or opened, locked, copied and restored."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from empo2.memory import ByScore, MemoryFileError, copy_memory
from empo2.memory.file import SCHEMA_VERSION, reading

from .stores import EAST, NORTH, add, open_store, play, rows, visit


@pytest.fixture
def store(tmp_path):
    with closing(open_store(tmp_path / "memory.db")) as store:
        yield store


def found(store, key=EAST):
    return [(tip.episode, tip.value) for tip in store.search("task", key, ByScore(10, 0.5))]


def content(path):
    """All rows of all tables."""
    tables = ("meta", "tips", "entries", "states", "plays", "credits")
    return {table: rows(path, f"SELECT * FROM {table}") for table in tables}


def credits(path):
    return rows(path, "SELECT * FROM credits")


def fill(store):
    add(store, "a", EAST, value=0.5)
    add(store, "b", NORTH)
    visit(store, "task", "s", EAST, threshold=0.9)
    play(store, "p", {1: 2, 77: 1})


def test_a_snapshot_is_a_memory_of_its_own(store, tmp_path):
    fill(store)
    target = tmp_path / "snapshot.db"
    store.snapshot(target)
    store.snapshot(target)
    add(store, "later", EAST)
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == ["snapshot.db"]
    with closing(open_store(target)) as copy:
        assert found(copy) == [("a", 0.75)]
        add(copy, "only here", EAST)
    assert found(store) == [("a", 0.75), ("later", 0.0)]


def test_a_snapshot_replaces_what_a_killed_process_left(tmp_path):
    live, kept = tmp_path / "live.db", tmp_path / "kept.db"
    store = open_store(live)
    add(store, "before", EAST)
    store.snapshot(kept)
    add(store, "after", EAST)
    left = {path: path.read_bytes() for path in tmp_path.glob("live.db*")}  # as a SIGKILL would leave them
    store.close()
    for path, content in left.items():
        path.write_bytes(content)
    assert live.with_name("live.db-wal").stat().st_size > 0
    for suffix in ("", "-wal", "-journal"):
        live.with_name(f"live.db.tmp{suffix}").write_text("half a snapshot")

    with closing(open_store(kept)) as snapshot:
        snapshot.snapshot(live)
    assert not list(tmp_path.glob("live.db.tmp*"))
    with closing(open_store(live)) as store:
        assert found(store) == [("before", 0.0)]


def test_a_snapshot_that_fails_leaves_the_older_one(store, tmp_path, monkeypatch):
    target = tmp_path / "snapshot.db"
    add(store, "a", EAST)
    store.snapshot(target)
    before = target.read_bytes()
    add(store, "b", EAST)

    def full(*args):
        raise OSError("disk is full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "replace", full)
        store.snapshot(target)
    assert target.read_bytes() == before
    assert not list(tmp_path.glob("*.tmp*"))


def test_the_open_file_is_neither_a_snapshot_nor_restored_from(store, tmp_path):
    for method in (store.snapshot, store.restore):
        with pytest.raises(ValueError, match="another path"):
            method(tmp_path / "." / "memory.db")


def test_restore_goes_back_and_the_store_goes_on(store, tmp_path):
    fill(store)
    snapshot = tmp_path / "snapshot.db"
    store.snapshot(snapshot)
    add(store, "later", EAST)
    store.remove_tips([1])
    for _ in range(2):
        visit(store, "task", "s", EAST, threshold=0.9)
    play(store, "q", [2], reward=5.0)
    assert (found(store), found(store, NORTH)) == ([("later", 0.0)], [("b", 2.5)])

    store.restore(str(snapshot))
    assert content(tmp_path / "memory.db") == content(snapshot)
    assert (found(store), found(store, NORTH)) == ([("a", 0.75)], [("b", 0.0)])
    assert visit(store, "task", "s", EAST, threshold=0.9) == 2
    assert credits(tmp_path / "memory.db") == [("p", 1, 2), ("p", 77, 1)]
    add(store, "after", EAST)
    (*_, new) = store.search("task", EAST, ByScore(10, 0.5))
    assert new.id == 4  # 3 was given to what has been undone, and may still be on its way in some episode
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == ["snapshot.db"]


def make_foreign(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.db"
    match kind:
        case "text":
            path.write_text("not a database, and long enough to be looked at" * 10)
        case "empty":
            path.touch()
        case "lost":
            path = folder / "absent" / path.name
        case "folder":
            path.mkdir()
        case "contacts":
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("CREATE TABLE contacts (name)")
        case "sundial" | "wide":
            open_store(path, **({"embedder": "sundial"} if kind == "sundial" else {"dimension": 4})).close()
        case "newer" | "cut":
            with closing(open_store(path)) as store:
                fill(store)
            if kind == "cut":
                path.write_bytes(path.read_bytes()[:6000])
            else:
                with closing(sqlite3.connect(path)) as db, db:
                    db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (SCHEMA_VERSION + 1,))
    return path


FOREIGN = {
    "text": "not a database",
    "contacts": "not a memory file",
    "newer": f"has memory schema {SCHEMA_VERSION + 1}; .* schema {SCHEMA_VERSION}",
    "folder": "is not a file",
    "cut": "malformed",
}
NOT_THERE = {"absent": "there is no such file", "empty": "not a memory file"}
OTHER_EMBEDDER = {
    "sundial": r"'sundial' \(3 dimensions\).*now 'compass' \(3\).*empo2 memory export",
    "wide": r"'compass' \(4 dimensions\).*now 'compass' \(3\)",
}
USES = {"open": FOREIGN | OTHER_EMBEDDER | {"lost": "unable to open"}, "restore": FOREIGN | NOT_THERE | OTHER_EMBEDDER}
USES |= {"read": FOREIGN | NOT_THERE, "copy": FOREIGN | NOT_THERE}


@pytest.mark.parametrize(
    ("use", "kind", "complaint"), [(use, *each) for use, kinds in USES.items() for each in kinds.items()]
)
def test_what_is_no_memory_is_named_and_nothing_changes(store, tmp_path, use, kind, complaint):
    fill(store)
    path = make_foreign(tmp_path, kind)

    def files():
        """Without SQLite's own beside them, which a look may leave."""
        found = (file for file in tmp_path.iterdir() if file.is_file() and not file.name.endswith(("-wal", "-shm")))
        return {file: file.read_bytes() for file in found}

    before, memory = files(), content(tmp_path / "memory.db")
    with pytest.raises(MemoryFileError, match=f"{kind}.db: .*{complaint}") as caught:
        match use:
            case "open":
                open_store(path)
            case "restore":
                store.restore(path)
            case "copy":
                copy_memory(path, tmp_path / "target.db")
            case "read":
                with reading(path) as db:
                    db.execute("SELECT * FROM tips").fetchall()
    assert "\n" not in str(caught.value)
    assert (files(), content(tmp_path / "memory.db")) == (before, memory)
    assert found(store) == [("a", 0.75)]


def test_restoring_from_a_damaged_snapshot_changes_nothing(store, tmp_path):
    fill(store)
    snapshot = tmp_path / "snapshot.db"
    store.snapshot(snapshot)
    with closing(sqlite3.connect(snapshot)) as db, db:
        db.execute("DROP TABLE states")  # the last of the tables to be restored
    with pytest.raises(MemoryFileError, match=r"snapshot.db: cannot be restored to .*memory.db: no such table"):
        store.restore(snapshot)
    assert found(store) == [("a", 0.75)]
    assert credits(tmp_path / "memory.db") == [("p", 1, 2), ("p", 77, 1)]
    add(store, "c", EAST)  # nothing is locked or attached still
    store.snapshot(snapshot)
    store.restore(snapshot)
    assert found(store) == [("a", 0.75), ("c", 0.0)]


def test_a_live_memory_can_be_copied_to_a_new_path(store, tmp_path):
    fill(store)
    memory, copy = tmp_path / "memory.db", tmp_path / "copy.db"
    copy_memory(memory, copy)
    add(store, "later", EAST)
    assert sorted(path.name for path in tmp_path.glob("copy*")) == ["copy.db"]
    assert rows(copy, "SELECT episode FROM tips") == [("a",), ("b",)]
    copy_memory(copy, tmp_path / "again.db")
    assert content(tmp_path / "again.db") == content(copy)
    with pytest.raises(MemoryFileError, match=r"copy.db: exists already"):
        copy_memory(memory, copy)
    assert content(tmp_path / "again.db") == content(copy)
    with pytest.raises(MemoryFileError, match=r"memory.db: cannot be copied to .*target.db"):
        copy_memory(memory, tmp_path / "absent" / "target.db")


HOLDER = """
import sys
from empo2.memory import MemoryStore
store = MemoryStore(sys.argv[1], embedder="compass", dimension=3)
print("open", flush=True)
sys.stdin.read()
store.close()
"""


def hold(path: Path) -> subprocess.Popen:
    """Another process that has the memory open until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "open\n"
    return process


def test_one_writer_at_a_time_and_the_lock_of_a_killed_one_is_free(tmp_path):
    path = tmp_path / "m.db"
    with hold(path) as holder:
        for name in (path, tmp_path / "alias.db"):
            if name != path:
                name.symlink_to(path)
            with pytest.raises(
                MemoryFileError, match=rf"{name.name}: is in use by another process \(pid {holder.pid}\)"
            ):
                open_store(name)
        copy_memory(path, tmp_path / "copy.db")  # readers need no lock
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        store = open_store(path)
        add(store, "e", EAST)
        with pytest.raises(MemoryFileError, match=rf"pid {os.getpid()}\)"):
            open_store(path)
        store.close()
    with closing(open_store(path)) as store:
        assert found(store) == [("e", 0.0)]


@pytest.mark.parametrize("table", ["entries", "states"])
@pytest.mark.parametrize("key", [b"", b"odd", np.ones(4, np.float32).tobytes(), "a text", 7])
def test_a_damaged_key_is_named(tmp_path, table, key):
    path = tmp_path / "m.db"
    with closing(open_store(path)) as store:
        fill(store)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE {table} SET key = ? WHERE id = 1", (key,))
    with closing(open_store(path)) as store, pytest.raises(MemoryFileError, match=r"m.db: is damaged: .* 12 bytes"):
        if table == "entries":
            found(store)
        else:
            visit(store, "task", "s", EAST, threshold=0.5)


def test_a_memory_and_what_lies_beside_it_is_its_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(open_store(tmp_path / "m.db")) as store:
            store.snapshot(tmp_path / "snapshot.db")
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("m.db", "m.db-wal", "m.db-shm", "m.db.lock", "snapshot.db"), 0o600)


def test_a_table_of_an_older_version_is_ignored(store, tmp_path):
    """Older files have networks of a second novelty, which is removed."""
    fill(store)
    old = tmp_path / "old.db"
    store.snapshot(old)
    with closing(sqlite3.connect(old)) as db, db:
        db.execute("CREATE TABLE networks (id INTEGER PRIMARY KEY, content BLOB NOT NULL)")
        db.execute("INSERT INTO networks VALUES (1, x'00')")
    add(store, "later", EAST)
    store.restore(old)
    assert found(store) == [("a", 0.75)]
    with closing(open_store(old)) as other:
        assert found(other) == [("a", 0.75)]
