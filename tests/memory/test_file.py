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

from empo2.memory import ByScore, MemoryFileError, MemoryStore, Step, copy_memory
from empo2.memory.file import SCHEMA_VERSION

from .visits import visit

EAST, NORTH, UP = np.eye(3, dtype=np.float32)


def open_store(path: str | Path, **changes) -> MemoryStore:
    return MemoryStore(path, **({"embedder": "compass", "dimension": 3} | changes))


@pytest.fixture
def store(tmp_path):
    with closing(open_store(tmp_path / "memory.db")) as store:
        yield store


def add(store, episode, key=EAST, **options):
    steps = [Step("s", key, "look")]
    store.add_episode("task", episode, tip=f"tip of {episode}", score=1.0, success=None, steps=steps, **options)


def found(store, key=EAST):
    return [(tip.episode, tip.value) for tip in store.search("task", key, ByScore(10, 0.5))]


def rows(path, table):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(f"SELECT * FROM {table}").fetchall()


TABLES = ("meta", "tips", "entries", "states", "plays", "credits")


def fill(store):
    add(store, "a", value=0.5)
    add(store, "b", NORTH)
    visit(store, "task", "s", EAST, threshold=0.9)
    store.record_play(
        "task", "p", score=50, success=True, searches=3, hits=2, shown={1: 2, 77: 1}, reward=1.0, learning_rate=0.5
    )


def test_a_snapshot_is_a_memory_of_its_own(store, tmp_path):
    fill(store)
    target = tmp_path / "snapshot.db"
    store.snapshot(target)
    store.snapshot(target)
    add(store, "later")
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == ["snapshot.db"]
    with closing(open_store(target)) as copy:
        assert found(copy) == [("a", 0.75)]
        add(copy, "only here")
    assert found(store) == [("a", 0.75), ("later", 0.0)]


def test_a_snapshot_replaces_what_a_killed_process_left(tmp_path):
    live, kept = tmp_path / "live.db", tmp_path / "kept.db"
    store = open_store(live)
    add(store, "before")
    store.snapshot(kept)
    add(store, "after")
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
    add(store, "a")
    store.snapshot(target)
    before = target.read_bytes()
    add(store, "b")

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
    add(store, "later")
    store.remove_tips([1])
    for _ in range(2):
        visit(store, "task", "s", EAST, threshold=0.9)
    store.record_play(
        "task", "q", score=0, success=False, searches=1, hits=1, shown={2: 1}, reward=5.0, learning_rate=0.5
    )
    assert (found(store), found(store, NORTH)) == ([("later", 0.0)], [("b", 2.5)])

    store.restore(str(snapshot))
    assert (found(store), found(store, NORTH)) == ([("a", 0.75)], [("b", 0.0)])
    assert visit(store, "task", "s", EAST, threshold=0.9) == 2
    assert [row[0] for row in rows(tmp_path / "memory.db", "plays")] == ["p"]
    assert rows(tmp_path / "memory.db", "credits") == [("p", 1, 2), ("p", 77, 1)]
    add(store, "after")
    (*_, new) = store.search("task", EAST, ByScore(10, 0.5))
    assert new.id == 4  # 3 was given to what has been undone, and may still be on its way in some episode
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == ["snapshot.db"]


def test_a_restored_memory_is_equal_to_the_snapshot_in_every_table(store, tmp_path):
    fill(store)
    store.snapshot(tmp_path / "snapshot.db")
    with closing(open_store(tmp_path / "other.db")) as other:
        for number in range(5):
            add(other, f"e{number}")
        other.restore(tmp_path / "snapshot.db")
    for table in TABLES:
        assert rows(tmp_path / "other.db", table) == rows(tmp_path / "snapshot.db", table)


def make_foreign(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.db"
    if kind == "text":
        path.write_text("not a database, and long enough to be looked at" * 10)
    elif kind == "contacts":
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("CREATE TABLE contacts (name)")
    elif kind == "newer":
        open_store(path).close()
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (SCHEMA_VERSION + 1,))
    elif kind == "sundial":
        open_store(path, embedder="sundial").close()
    elif kind == "wide":
        open_store(path, dimension=4).close()
    elif kind == "empty":
        path.touch()
    return path


FOREIGN = [
    ("text", "not a database"),
    ("contacts", "not a memory file"),
    ("newer", f"has memory schema {SCHEMA_VERSION + 1}; .* schema {SCHEMA_VERSION}"),
]
OTHER_EMBEDDER = [
    ("sundial", r"'sundial' \(3 dimensions\).*now 'compass' \(3\).*empo2 memory export"),
    ("wide", r"'compass' \(4 dimensions\).*now 'compass' \(3\)"),
]


@pytest.mark.parametrize(("kind", "complaint"), [*FOREIGN, *OTHER_EMBEDDER])
def test_foreign_files_are_refused_and_left_as_they_were(tmp_path, kind, complaint):
    path = make_foreign(tmp_path, kind)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(MemoryFileError, match=f"{kind}.db: .*{complaint}"):
        open_store(path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MemoryFileError, match=r"m.db: .*unable to open"):
        open_store(tmp_path / "absent" / "m.db")


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [*FOREIGN, *OTHER_EMBEDDER, ("absent", "there is no such file"), ("empty", "not a memory file")],
)
def test_restoring_from_a_foreign_file_changes_nothing(store, tmp_path, kind, complaint):
    fill(store)
    snapshot = make_foreign(tmp_path, kind)
    before = [rows(tmp_path / "memory.db", table) for table in TABLES]
    with pytest.raises(MemoryFileError, match=f"{kind}.db: .*{complaint}"):
        store.restore(snapshot)
    assert [rows(tmp_path / "memory.db", table) for table in TABLES] == before
    assert found(store) == [("a", 0.75)]
    assert (kind == "absent") == (not snapshot.exists())


def test_restoring_from_a_damaged_snapshot_changes_nothing(store, tmp_path):
    fill(store)
    snapshot = tmp_path / "snapshot.db"
    store.snapshot(snapshot)
    with closing(sqlite3.connect(snapshot)) as db, db:
        db.execute("DROP TABLE states")  # the last of the tables to be restored
    with pytest.raises(MemoryFileError, match=r"snapshot.db: cannot be restored to .*memory.db: no such table"):
        store.restore(snapshot)
    assert found(store) == [("a", 0.75)]
    assert rows(tmp_path / "memory.db", "credits") == [("p", 1, 2), ("p", 77, 1)]
    add(store, "c")  # nothing is locked or attached still
    store.snapshot(snapshot)
    store.restore(snapshot)
    assert found(store) == [("a", 0.75), ("c", 0.0)]


def test_others_can_read_while_the_store_is_open(store, tmp_path):
    add(store, "e")
    with closing(sqlite3.connect(tmp_path / "memory.db")) as reader:
        assert reader.execute("SELECT episode FROM tips").fetchall() == [("e",)]
        store.add_episode("task", "f", tip="t", score=0, success=None, steps=[Step("s", EAST, "go")])
        assert reader.execute("SELECT count(*) FROM tips").fetchone() == (2,)


def test_a_live_memory_can_be_copied(store, tmp_path):
    fill(store)
    copy_memory(tmp_path / "memory.db", tmp_path / "copy.db")
    add(store, "later")
    assert sorted(path.name for path in tmp_path.glob("copy*")) == ["copy.db"]
    assert [row[2] for row in rows(tmp_path / "copy.db", "tips")] == ["a", "b"]
    copy_memory(tmp_path / "copy.db", tmp_path / "copy of the copy.db")
    for table in TABLES:
        assert rows(tmp_path / "copy of the copy.db", table) == rows(tmp_path / "copy.db", table)


@pytest.mark.parametrize(
    ("kind", "complaint"), [*FOREIGN, ("absent", "there is no such file"), ("empty", "not a memory file")]
)
def test_copying_a_foreign_file_is_refused_and_leaves_nothing(tmp_path, kind, complaint):
    source = make_foreign(tmp_path, kind)
    with pytest.raises(MemoryFileError, match=f"{kind}.db: .*{complaint}"):
        copy_memory(source, tmp_path / "target.db")
    assert not list(tmp_path.glob("target*"))
    assert source.exists() == (kind != "absent")


def test_a_copy_replaces_nothing_and_a_failed_one_leaves_nothing(store, tmp_path):
    target = tmp_path / "target.db"
    target.write_text("something of the user's")
    with pytest.raises(MemoryFileError, match=r"target.db: exists already"):
        copy_memory(tmp_path / "memory.db", target)
    assert target.read_text() == "something of the user's"
    with pytest.raises(MemoryFileError, match=r"memory.db: cannot be copied to .*target.db"):
        copy_memory(tmp_path / "memory.db", tmp_path / "absent" / "target.db")


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
        add(store, "e")
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
