"""Reading a memory file: a live one, a snapshot, and what is none."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from empo2.memory import ByScore, BySimilarity
from empo2.memory.browse import ScopeCounts, embedder_of, find_tips, plays, scope_counts, scopes, stored_tips, tip_uses
from empo2.memory.file import reading

from .stores import BETWEEN, EAST, NORTH, UP, add, open_store, play, visit

ODD = "[\"'];-- \u2028 é😀"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Tips 1 to 4, of which 3 is shown in two plays and 1 in one; a tip and a play in an odd scope."""
    with closing(open_store(tmp_path / "memory.sqlite")) as store:
        add(store, "one", EAST, NORTH, scope="a", score=5, success=True, created=100.0)
        add(store, "two", EAST, scope="a", score=7, success=False, created=400.0, value=-1.0)
        add(store, "three", BETWEEN, scope="a", score=5, created=300.0, value=0.5)
        add(store, "four", UP, scope=ODD, score=-3, created=200.0)
        play(store, "p", [1, 3], scope="a", score=1, success=True, searches=2)
        play(store, "q", [3], scope="a", score=-2, success=False, searches=2)
        play(store, "r", scope=ODD, score=4, searches=2, hits=0)
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
        assert [tip.episode for tip in stored_tips(db, [ODD], order=order)] == ["four"]
        assert stored_tips(db, [], order=order) == []
        # 0.5 -> 0.75 by the reward 1 -> -0.625 by the reward -2, each with a learning rate of 0.5
        assert (3, "a", "three", "tip of three", 5.0, None, -0.625, 300.0, 2) in stored_tips(db, order=order)


def test_scopes_and_their_counts(file: Path) -> None:
    with reading(file) as db:
        assert embedder_of(db) == ("compass", 3)
        assert scopes(db) == sorted([ODD, "a", "states only"])
        assert scope_counts(db, ["a", "states only", ODD, "none"]) == [
            ScopeCounts("a", tips=3, entries=4, states=1, plays=2, searches=4, hits=2, score=-1),
            ScopeCounts("states only", tips=0, entries=0, states=1, plays=0, searches=0, hits=0, score=0),
            ScopeCounts(ODD, tips=1, entries=1, states=0, plays=1, searches=2, hits=0, score=4),
            ScopeCounts("none", 0, 0, 0, 0, 0, 0, 0),
        ]
        assert [(play.episode, play.score, play.success) for play in plays(db)] == [
            ("p", 1, True),
            ("q", -2, False),
            ("r", 4, None),
        ]
        assert [play.episode for play in plays(db, [ODD])] == ["r"]


@pytest.mark.parametrize("policy", [ByScore(2, 0.5), BySimilarity(5, 0.5)])
def test_finds_what_the_store_finds(file: Path, policy) -> None:
    for key in (EAST, NORTH, BETWEEN, UP):
        with reading(file) as db:
            found = [(tip.id, tip.text, tip.value, cosine) for tip, cosine in find_tips(db, ["a"], 2 * key, policy)]
        with closing(open_store(file)) as store:
            assert found == [(tip.id, tip.text, tip.value, tip.similarity) for tip in store.search("a", key, policy)]
    with reading(file) as db:
        several = find_tips(db, ["a", ODD], EAST + NORTH + UP, ByScore(9, 0.5))
        assert [tip.episode for tip, _ in several] == ["two", "three", "one", "four"]


def test_a_live_file_is_read_as_it_was_and_its_writer_goes_on(file: Path) -> None:
    with closing(open_store(file)) as store:
        add(store, "five", EAST, scope="a")
        with reading(file) as db:
            assert len(stored_tips(db, order="best")) == 5
            add(store, "six", EAST, scope="a")
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                db.execute("DELETE FROM tips")
            store.remove_tips([1])
            assert {tip.id for tip in stored_tips(db, order="best")} == {1, 2, 3, 4, 5}
        with reading(file) as db:
            assert {tip.id for tip in stored_tips(db, order="best")} == {2, 3, 4, 5, 6}


def test_in_a_folder_that_cannot_be_written_to_nothing_is_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    before = {*file.parent.iterdir()}
    with reading(file) as db:
        assert len(stored_tips(db, order="best")) == 4
        assert {*file.parent.iterdir()} == before


def test_uses_of_tips_are_compared_within_their_scope(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "memory.sqlite")) as store:
        for episode in ("one", "two", "three"):
            add(store, episode, EAST)
        add(store, "other", EAST, scope="b")
        for episode, shown, score in [("p", [1], 90), ("q", [1, 2], 70), ("r", [2, 3], 20), ("s", [], 40)]:
            play(store, episode, shown, score=score)
        for episode in "uv":
            play(store, episode, [4], scope="b", score=1000)  # always shown: nothing to compare with
    with reading(tmp_path / "memory.sqlite") as db:
        found = [(use.tip.text, use.shown_return, use.other_return, use.gain) for use in tip_uses(db)]
        assert found == [
            ("tip of one", 80, 30, 50),
            ("tip of two", 45, 65, -20),
        ]
        assert [use.tip.text for use in tip_uses(db, least=1)] == ["tip of one", "tip of two", "tip of three"]
        assert [use.tip.id for use in tip_uses(db, least=3)] == []
