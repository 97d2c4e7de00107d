"""The memory file: refused or opened, locked, copied and restored."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from random import Random
from unittest.mock import Mock

import numpy as np
import pytest

from empo2.memory import ByScore, MemoryFileError, copy_memory
from empo2.memory.file import reading

from .stores import EAST, NORTH, add, open_store, play, rows, visit


@pytest.fixture
def store(tmp_path):
    with closing(open_store(tmp_path / "memory.db")) as store:
        yield store


def found(store, key=EAST):
    return [(tip.episode, tip.value) for tip in store.search("task", key, ByScore(10, 0.5))]


def content(path):
    tables = ("meta", "tips", "entries", "states", "plays", "credits")
    return {table: rows(path, f"SELECT * FROM {table}") for table in tables}


def fill(store):
    add(store, "a", EAST, value=0.5)
    add(store, "b", NORTH)
    visit(store, "task", "s", EAST, threshold=0.9)
    play(store, "p", {1: 2, 77: 1})


def test_a_snapshot_is_a_memory_of_its_own_and_one_that_fails_leaves_the_older_one(store, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="another path"):
        store.snapshot(tmp_path / "." / "memory.db")
    fill(store)
    target = tmp_path / "snapshot.db"
    store.snapshot(target)
    store.snapshot(target)
    add(store, "later", EAST)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "replace", Mock(side_effect=OSError("disk is full")))
        store.snapshot(target)
    assert not list(tmp_path.glob("*.tmp*"))
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
    add(store, "after", EAST)
    (*_, new) = store.search("task", EAST, ByScore(10, 0.5))
    assert new.id == 4  # 3 was given to what has been undone, and may still be on its way in some episode
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == ["snapshot.db"]


@pytest.fixture
def foreign(tmp_path):
    (folder := tmp_path / "foreign").mkdir()
    (folder / "text.db").write_text("not a database, and long enough to be looked at" * 10)
    (folder / "empty.db").touch()
    (folder / "folder.db").mkdir()
    open_store(folder / "sundial.db", embedder="sundial").close()
    open_store(folder / "wide.db", dimension=4).close()
    for name in ("cut.db", "newer.db"):
        with closing(open_store(folder / name)) as store:
            fill(store)
    os.truncate(folder / "cut.db", 6000)
    changes = {"contacts": "CREATE TABLE contacts (name)", "newer": "UPDATE meta SET value = 3 WHERE key = 'schema'"}
    for name, change in changes.items():
        with closing(sqlite3.connect(folder / f"{name}.db")) as db, db:
            db.execute(change)
    return folder


USES = ("open", "restore", "read", "copy")


@pytest.mark.parametrize(
    ("kind", "uses", "complaint"),
    [
        ("text", USES, "not a database"),
        ("contacts", USES, "not a memory file"),
        ("newer", USES, "has memory schema 3; .* schema 2"),
        ("folder", USES, "is not a file"),
        ("cut", USES, "malformed"),
        ("absent/lost", ["open"], "unable to open"),
        ("absent", USES[1:], "there is no such file"),
        ("empty", USES[1:], "not a memory file"),
        ("sundial", USES[:2], r"'sundial' \(3 dimensions\).*now 'compass' \(3\).*empo2 memory export"),
        ("wide", USES[:2], r"'compass' \(4 dimensions\).*now 'compass' \(3\)"),
    ],
)
def test_what_is_no_memory_is_named_and_nothing_changes(store, foreign, tmp_path, kind, uses, complaint):
    fill(store)
    path = foreign / f"{kind}.db"

    def read():
        with reading(path) as db:
            db.execute("SELECT * FROM tips").fetchall()

    def files():
        """Without SQLite's own beside them, which a look may leave."""
        found = (file for file in tmp_path.rglob("*") if file.is_file() and not file.name.endswith(("-wal", "-shm")))
        return {file: file.read_bytes() for file in found}

    do = {"open": lambda: open_store(path), "restore": lambda: store.restore(path), "read": read}
    do["copy"] = lambda: copy_memory(path, tmp_path / "target.db")
    before, memory = files(), content(tmp_path / "memory.db")
    for use in uses:
        with pytest.raises(MemoryFileError, match=f"{kind}.db: .*{complaint}") as caught:
            do[use]()
        assert "\n" not in str(caught.value)
        assert (files(), content(tmp_path / "memory.db"), found(store)) == (before, memory, [("a", 0.75)]), use


def test_restoring_from_a_damaged_snapshot_changes_nothing(store, tmp_path):
    fill(store)
    snapshot = tmp_path / "snapshot.db"
    store.snapshot(snapshot)
    before = content(snapshot)
    with closing(sqlite3.connect(snapshot)) as db, db:
        db.execute("DROP TABLE states")  # the last of the tables to be restored
    with pytest.raises(MemoryFileError, match=r"snapshot.db: cannot be read as a memory file: no such table"):
        store.restore(snapshot)
    assert (found(store), content(tmp_path / "memory.db")) == ([("a", 0.75)], before)
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
    with pytest.raises(MemoryFileError, match=r"copy.db: exists already"):
        copy_memory(memory, copy)
    assert rows(copy, "SELECT episode FROM tips") == [("a",), ("b",)]
    with pytest.raises(MemoryFileError, match=r"memory.db: cannot be copied to .*target.db"):
        copy_memory(memory, tmp_path / "absent" / "target.db")


HOLDER = """
import sys, time
from empo2.memory import MemoryStore
store = MemoryStore(sys.argv[1], embedder="compass", dimension=3)
print("open", flush=True)
time.sleep(1000)
"""


def test_one_writer_at_a_time_and_the_lock_of_a_killed_one_is_free(tmp_path):
    path = tmp_path / "m.db"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"open\n"
        (tmp_path / "alias.db").symlink_to(path)
        for name in ("m.db", "alias.db"):
            with pytest.raises(MemoryFileError, match=rf"{name}: is in use by another process \(pid {holder.pid}\)"):
                open_store(tmp_path / name)
        copy_memory(path, tmp_path / "copy.db")  # readers need no lock
        holder.kill()
        holder.wait()
    with closing(open_store(path)) as store:
        add(store, "e", EAST)
        with pytest.raises(MemoryFileError, match=rf"pid {os.getpid()}\)"):
            open_store(path)
    with closing(open_store(path)) as store:
        assert found(store) == [("e", 0.0)]


@pytest.mark.parametrize("key", [b"", b"odd", np.ones(4, np.float32).tobytes(), "a text", 7])
def test_a_damaged_key_is_named(tmp_path, key):
    path = tmp_path / "m.db"
    with closing(open_store(path)) as store:
        fill(store)
    with closing(sqlite3.connect(path)) as db, db:
        for table in ("entries", "states"):
            db.execute(f"UPDATE {table} SET key = ? WHERE id = 1", (key,))
    with closing(open_store(path)) as store:
        for use in (found, lambda store: visit(store, "task", "s", EAST, threshold=0.5)):
            with pytest.raises(MemoryFileError, match=r"m.db: is damaged: .* 12 bytes"):
                use(store)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("UPDATE tips SET score = 'much' WHERE id = 1", "the table 'tips' holds .*'much'"),
        ("UPDATE tips SET score = 9e999 WHERE id = 1", "the table 'tips' holds .*inf"),
        ("UPDATE states SET scope = x'00ff'", "the table 'states' holds"),
        ("DELETE FROM meta WHERE key = 'embedder'", "its table 'meta' lacks embedder"),
    ],
)
def test_a_value_of_another_type_is_named_before_it_fails_a_search(tmp_path, damage, complaint):
    path = tmp_path / "m.db"
    with closing(open_store(path)) as store:
        fill(store)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(damage)
    with pytest.raises(MemoryFileError, match=f"m.db: is damaged .*{complaint}"):
        open_store(path)
    with pytest.raises(MemoryFileError, match="is damaged"), reading(path):
        pass


def test_a_damaged_letter_costs_that_letter_alone(tmp_path):
    path = tmp_path / "m.db"
    with closing(open_store(path)) as store:
        fill(store)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE tips SET text = CAST(x'6ff061' AS TEXT) WHERE id = 1")
    with closing(open_store(path)) as store:
        tips = {tip.text for tip in store.search("task", EAST, ByScore(10, 0.5))}
    assert "o\N{REPLACEMENT CHARACTER}a" in tips


def test_whatever_byte_is_damaged_there_is_one_clear_error(tmp_path):
    """Twenty bytes at random of each of 100 copies, half of them in the first two pages, which hold the schema."""
    with closing(open_store(tmp_path / "m.db")) as store:
        fill(store)
    whole, random, refused = (tmp_path / "m.db").read_bytes(), Random(1), 0
    for number in range(100):
        damaged = bytearray(whole)
        for _ in range(20):
            damaged[random.randrange(8192 if number % 2 else len(whole))] = random.randrange(256)
        (path := tmp_path / f"{number}.db").write_bytes(damaged)
        try:
            with closing(open_store(path)) as store:
                found(store)
        except MemoryFileError as error:
            refused += str(error).startswith(str(path))
    assert refused > 50


def test_an_empty_file_becomes_a_memory(tmp_path):
    (path := tmp_path / "m.db").touch()
    with closing(open_store(path)) as store:
        fill(store)
        assert found(store) == [("a", 0.75)]


def test_a_memory_and_what_lies_beside_it_is_its_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(open_store(tmp_path / "m.db")) as store:
            store.snapshot(tmp_path / "snapshot.db")
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("m.db", "m.db-wal", "m.db-shm", "m.db.lock", "snapshot.db"), 0o600)
