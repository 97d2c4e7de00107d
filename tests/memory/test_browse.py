"""Reading a memory file: a live one, a snapshot, and what is none."""

import math
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from empo2.memory import ByScore, BySimilarity, MemoryFileError, MemoryStore, Step
from empo2.memory.browse import (
    Conditions,
    ScopeCounts,
    embedder_of,
    find_tips,
    plays,
    scope_counts,
    scopes,
    stored_tips,
    tip_uses,
)
from empo2.memory.file import reading

from .visits import visit

EAST, NORTH, UP = np.eye(3, dtype=np.float32)
BETWEEN = (EAST + NORTH) / math.sqrt(2)  # cosine 0.707 to both
ODD = "[\"'];-- \u2028 é😀"


def open_store(path: Path) -> MemoryStore:
    return MemoryStore(path, embedder="compass", dimension=3)


def add(store: MemoryStore, episode: str, *keys: np.ndarray, scope: str = "a", **changes) -> None:
    steps = [Step(f"{episode} {number}", key, "go") for number, key in enumerate(keys)]
    given = {"tip": f"tip of {episode}", "score": 0.0, "success": None} | changes
    assert store.add_episode(scope, episode, steps=steps, **given) == len(keys)


def play(store: MemoryStore, episode: str, *shown: int, scope: str = "a", score: float = 1.0, hits: int = 1) -> None:
    store.record_play(
        scope,
        episode,
        score=score,
        success=score > 0,
        searches=2,
        hits=hits,
        shown=dict.fromkeys(shown, 3),
        reward=score,
        learning_rate=0.5,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Tips 1 to 4, of which 3 is shown in two plays and 1 in one; a tip and a play in an odd scope."""
    with closing(open_store(tmp_path / "memory.sqlite")) as store:
        add(store, "one", EAST, NORTH, score=5, success=True, created=100.0)
        add(store, "two", EAST, score=7, success=False, created=400.0, value=-1.0)
        add(store, "three", BETWEEN, score=5, created=300.0, value=0.5)
        add(store, "four", UP, scope=ODD, score=-3, created=200.0)
        play(store, "p", 1, 3, score=1)
        play(store, "q", 3, score=-2)
        play(store, "r", scope=ODD, score=4, hits=0)
        visit(store, "a", "here", EAST, threshold=0.9)
        visit(store, "states only", "there", UP, threshold=0.9)
    return tmp_path / "memory.sqlite"


@pytest.mark.parametrize(
    ("order", "episodes"),
    [
        ("best", ["two", "three", "one", "four"]),
        ("newest", ["two", "three", "four", "one"]),
        ("used", ["three", "one", "two", "four"]),
        ("value", ["one", "four", "three", "two"]),
    ],
)
def test_tips_in_order(file: Path, order, episodes: list[str]) -> None:
    with reading(file) as db:
        assert [tip.episode for tip in stored_tips(db, order=order)] == episodes
        assert [tip.episode for tip in stored_tips(db, order=order, limit=2)] == episodes[:2]
        assert [tip.episode for tip in stored_tips(db, [ODD], order=order)] == ["four"]
        assert stored_tips(db, [], order=order) == []


def test_a_tip_as_it_is_stored(file: Path) -> None:
    with reading(file) as db:
        tip = stored_tips(db, order="used")[0]
    # 0.5 -> 0.75 by the reward 1 -> -0.625 by the reward -2, each with a learning rate of 0.5
    assert tip == (3, "a", "three", "tip of three", 5.0, None, -0.625, 300.0, 2)


@pytest.mark.parametrize(
    ("conditions", "episodes"),
    [
        (Conditions(), {"one", "two", "three", "four"}),
        (Conditions(score_below=5), {"four"}),
        (Conditions(score_below=5.1), {"one", "three", "four"}),
        (Conditions(value_below=0), {"two", "three"}),
        (Conditions(created_before=300), {"one", "four"}),
        (Conditions(never_shown=True), {"two", "four"}),
        (Conditions(never_shown=True, score_below=6), {"four"}),
        (Conditions(score_below=6, value_below=0, created_before=300), set()),
    ],
)
def test_conditions_are_all_met(file: Path, conditions: Conditions, episodes: set[str]) -> None:
    with reading(file) as db:
        assert {tip.episode for tip in stored_tips(db, order="best", conditions=conditions)} == episodes


def test_scopes_and_their_counts(file: Path) -> None:
    with reading(file) as db:
        assert embedder_of(db) == ("compass", 3)
        assert scopes(db) == sorted([ODD, "a", "states only"])
        assert scope_counts(db, ["a", "states only", ODD, "none"]) == [
            ScopeCounts("a", tips=3, entries=4, states=1, plays=2, searches=4, hits=2),
            ScopeCounts("states only", tips=0, entries=0, states=1, plays=0, searches=0, hits=0),
            ScopeCounts(ODD, tips=1, entries=1, states=0, plays=1, searches=2, hits=0),
            ScopeCounts("none", 0, 0, 0, 0, 0, 0),
        ]
        assert [(play.episode, play.score, play.success) for play in plays(db)] == [
            ("p", 1, True),
            ("q", -2, False),
            ("r", 4, True),
        ]
        assert [play.episode for play in plays(db, [ODD])] == ["r"]


@pytest.mark.parametrize("policy", [ByScore(2, 0.5), BySimilarity(5, 0.5)])
def test_finds_what_the_store_finds(file: Path, policy) -> None:
    for key in (EAST, NORTH, BETWEEN, UP):
        with reading(file) as db:
            found = [(tip.id, tip.text, tip.value, cosine) for tip, cosine in find_tips(db, ["a"], 2 * key, policy)]
        with closing(open_store(file)) as store:
            assert found == [(tip.id, tip.text, tip.value, tip.similarity) for tip in store.search("a", key, policy)]


def test_several_scopes_are_searched_as_one(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "m")) as store:
        for scope, episode, score in [("a", "low", 1), ("b", "high", 3), ("a", "middle", 2), ("c", "other", 9)]:
            add(store, episode, EAST, scope=scope, score=score)
    with reading(tmp_path / "m") as db:
        assert [tip.episode for tip, _ in find_tips(db, ["a", "b"], EAST, ByScore(9, 0.5))] == ["high", "middle", "low"]


def test_a_live_file_is_read_as_it_was_and_its_writer_goes_on(file: Path) -> None:
    with closing(open_store(file)) as store:
        add(store, "five", EAST)
        before = {path.name: path.read_bytes() for path in file.parent.glob("*") if not path.name.endswith("-shm")}
        with reading(file) as db:
            assert len(stored_tips(db, order="best")) == 5
        assert before == {
            path.name: path.read_bytes() for path in file.parent.glob("*") if not path.name.endswith("-shm")
        }
        with reading(file) as db:
            assert len(stored_tips(db, order="best")) == 5
            add(store, "six", EAST)
            store.remove_tips([1])
            assert {tip.id for tip in stored_tips(db, order="best")} == {1, 2, 3, 4, 5}
        with reading(file) as db:
            assert {tip.id for tip in stored_tips(db, order="best")} == {2, 3, 4, 5, 6}


def test_nothing_can_be_written(file: Path) -> None:
    with pytest.raises(MemoryFileError, match="readonly"), reading(file) as db:
        db.execute("DELETE FROM tips")
    with reading(file) as db:
        assert len(stored_tips(db, order="best")) == 4


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, to whom the folder is closed")
def test_in_a_folder_that_cannot_be_written_to(file: Path) -> None:
    folders = [path for path in file.parents if Path(tempfile.gettempdir()) in path.parents]
    modes = {folder: folder.stat().st_mode for folder in folders}
    for folder in folders:
        folder.chmod(0o755)
    file.chmod(0o644)  # as its owner may do
    os.setresuid(65534, 65534, 0)
    try:
        assert not os.access(file.parent, os.W_OK)
        with reading(file) as db:
            assert len(stored_tips(db, order="best")) == 4
    finally:
        os.setresuid(0, 0, 0)
        for folder, mode in modes.items():
            folder.chmod(mode)


def spoil(file: Path, kind: str) -> Path:
    if kind == "missing":
        return file.with_name("missing")
    if kind == "folder":
        return file.parent
    if kind == "text":
        file.write_text("a poem " * 1000)
    if kind == "empty":
        file.write_bytes(b"")
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:6000])
    if kind in ("schema", "other"):
        with closing(sqlite3.connect(file)) as db, db:
            db.execute("UPDATE meta SET value = 1 WHERE key = 'schema'" if kind == "schema" else "DROP TABLE meta")
    return file


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "there is no such file"),
        ("folder", "is not a file"),
        ("text", "not a database"),
        ("empty", "not a memory file"),
        ("other", "not a memory file"),
        ("schema", "has memory schema 1"),
        ("cut", "malformed"),
    ],
)
def test_what_is_no_memory_is_named(file: Path, kind: str, words: str) -> None:
    path = spoil(file, kind)
    with pytest.raises(MemoryFileError, match=words) as caught, reading(path) as db:
        stored_tips(db, order="best")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_uses_of_tips_are_compared_within_their_scope(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "memory.sqlite")) as store:
        for episode in ("one", "two", "three"):
            add(store, episode, EAST)
        add(store, "other", EAST, scope="b")
        play(store, "p", 1, score=90)
        play(store, "q", 1, 2, score=70)
        play(store, "r", 2, 3, score=20)
        play(store, "s", score=10)
        play(store, "t", score=30)
        for episode in "uv":
            play(store, episode, 4, scope="b", score=1000)  # always shown: nothing to compare with
    with reading(tmp_path / "memory.sqlite") as db:
        found = [(use.tip.text, use.shown_return, use.other_return, use.gain) for use in tip_uses(db)]
        assert found == [
            ("tip of one", 80, pytest.approx(20), pytest.approx(60)),
            ("tip of two", 45, pytest.approx(130 / 3), pytest.approx(5 / 3)),
        ]
        assert [use.tip.text for use in tip_uses(db, least=1)] == ["tip of one", "tip of two", "tip of three"]
        assert [use.tip.id for use in tip_uses(db, least=3)] == []
