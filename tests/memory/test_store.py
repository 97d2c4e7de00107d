"""The store by hand: what is found, what tips are worth, and how often states were visited. See also test_histories."""

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory import ByScore, Step, Visit

from .stores import BETWEEN, EAST, NORTH, UP, add, open_store, play, rows, sizes, visit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.db"


@pytest.fixture
def store(path):
    with closing(open_store(path)) as store:
        yield store


def search(store, key):
    return store.search("task", key, ByScore(10, 0.5))


def found(store, key):
    return [tip.episode for tip in search(store, key)]


def values(store, key=EAST):
    return {tip.episode: tip.value for tip in search(store, key)}


@pytest.mark.parametrize("success", [None, False, True])
def test_a_tip_is_found_by_the_state_nearest_to_the_query(store, success):
    assert add(store, "e", ("start", EAST, "go"), ("end", NORTH, "stop"), score=-3.5, success=success) == 1
    (tip,) = search(store, NORTH)
    assert (tip.episode, tip.text, tip.action, tip.score, tip.success) == ("e", "tip of e", "stop", -3.5, success)
    assert tip.similarity == pytest.approx(1)
    assert search(store, 7 * BETWEEN)[0].similarity == pytest.approx(math.sqrt(0.5))  # keys need not be normalised
    assert search(store, UP) == []


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.integers(1, 4), st.randoms())
@settings(max_examples=50)
def test_a_search_with_exclusions_is_one_in_a_memory_without_those_tips(excluded, k, random):
    episodes = [(name, random.choice([EAST, BETWEEN, NORTH]), random.randint(0, 2)) for name in "abcdefgh"]
    with closing(open_store(":memory:")) as whole, closing(open_store(":memory:")) as part:
        for name, key, score in episodes:
            add(whole, name, key, score=score)
            if name not in excluded:
                add(part, name, key, score=score)
        found = whole.search("task", EAST, ByScore(k, 0.5), exclude=[f"tip of {name}" for name in excluded])
        assert [tip.episode for tip in found] == [tip.episode for tip in part.search("task", EAST, ByScore(k, 0.5))]


def test_the_last_entries_of_a_tip_keep_it_however_many_tips_give_way(path):
    with closing(open_store(path, capacity=6)) as store:
        for episode in "abc":
            add(store, episode, ("s", EAST, f"{episode}1"), ("t", EAST, f"{episode}2"))
        add(store, "d", ("s", EAST, "d1"), ("t", EAST, "d2"), ("u", EAST, "d3"))  # a goes, and half of b
        assert sizes(path) == {"task": (3, 6)}
        assert [(tip.episode, tip.action) for tip in search(store, EAST)] == [("d", "d3"), ("c", "c2"), ("b", "b2")]
        add(store, "e", *[EAST] * 4)  # b, c and d1
        assert (found(store, EAST), sizes(path)) == (["e", "d"], {"task": (2, 6)})
    with closing(open_store(path, capacity=2)) as store:  # smaller than what it holds
        assert (found(store, EAST), sizes(path)) == (["e", "d"], {"task": (2, 6)})
        add(store, "f", EAST)
        assert (found(store, EAST), sizes(path)) == (["f", "e"], {"task": (2, 2)})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tip": " \n"}, "tip of episode 'e' is empty"),
        ({"tip": "x" * 12_001}, "12001 characters"),
        ({"score": -math.inf}, "score of episode 'e' is -inf"),
        ({"value": math.nan}, "value of episode 'e' is nan"),
        ({"steps": [Step("s", EAST, "a"), Step("s", np.ones(2), "a")]}, r"key has shape \(2,\)"),
        ({"steps": [Step("s", EAST, "a"), Step("\ud800", EAST, "a")]}, "surrogates"),
    ],
)
def test_a_bad_episode_is_named_and_leaves_nothing(store, path, changes, complaint):
    episode = {"tip": "t", "score": 1.0, "success": None, "steps": [Step("s", EAST, "a")]}
    with pytest.raises(ValueError, match=complaint):
        store.add_episode("task", "e", **(episode | changes))
    assert (store.size(), sizes(path), found(store, EAST)) == (0, {}, [])
    assert store.add_episode("task", "e", **episode) == 1


# Plays


def test_a_revised_tip_has_its_new_text_and_score_now_and_later(store, path):
    first, second = add(store, "e", EAST, NORTH, score=1.0), add(store, "f", EAST, score=2.0)
    store.revise(first, "another text", 3.0)
    store.revise(second, "a third")
    store.revise(99, "of nobody")
    assert store.texts([first, 99, second]) == {first: "another text", second: "a third"}
    with closing(open_store(path.with_name("copy.db"))) as other:
        store.snapshot(path.with_name("snapshot.db"))
        other.restore(path.with_name("snapshot.db"))
        for each in (store, other):
            assert [(tip.text, tip.score) for tip in search(each, EAST)] == [("another text", 3.0), ("a third", 2.0)]
            hidden = each.search("task", NORTH, ByScore(10, 0.5), exclude=["another text"])
            assert not hidden and each.search("task", NORTH, ByScore(10, 0.5), exclude=["tip of e"])
    for text, score in (("", 1.0), ("x", math.nan)):
        with pytest.raises(ValueError, match=r"revised tip 1 is empty|score of episode 'tip 1' is nan"):
            store.revise(first, text, score)
    assert store.texts([first]) == {first: "another text"}


def test_values_move_towards_the_reward(store, path):
    for episode in "abc":
        add(store, episode, EAST, NORTH)
    assert values(store) == {"a": 0, "b": 0, "c": 0}
    play(store, "p1", [1, 2], reward=1.0)
    assert values(store) == {"a": 0.5, "b": 0.5, "c": 0}
    play(store, "p2", {1: 30}, reward=-1.0)  # however many turns
    assert values(store) == {"a": -0.25, "b": 0.5, "c": 0}
    play(store, "p3", [1, 3], reward=2.0, learning_rate=0.25)
    assert values(store) == {"a": 0.3125, "b": 0.5, "c": 0.5}
    assert values(store, NORTH) == values(store)  # one value for all the states of a tip
    assert rows(path, "SELECT value FROM tips ORDER BY id") == [(0.3125,), (0.5,), (0.5,)]


@pytest.mark.parametrize("success", [None, False, True])
def test_a_play_is_stored_once_and_as_given(store, path, success):
    add(store, "a", EAST)
    play(store, "p", {1: 30}, score=np.float32(-2.5), success=success, searches=4, hits=3)  # pyright: ignore[reportArgumentType]
    play(store, "p", {1: 5, 2: 1}, reward=100.0)
    (play_,) = rows(path, "SELECT episode, scope, score, success, searches, hits FROM plays")
    assert play_ == ("p", "task", -2.5, success, 4, 3)
    assert rows(path, "SELECT * FROM credits") == [("p", 1, 30)]


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"score": math.nan}, ValueError, "score of episode 'p' is nan"),
        ({"reward": -math.inf}, ValueError, "reward of episode 'p' is -inf"),
        ({"shown": {1: 1, 2: None}}, sqlite3.IntegrityError, "NOT NULL"),  # half way
    ],
)
def test_a_bad_play_is_named_and_leaves_nothing(store, path, changes, error, complaint):
    add(store, "a", EAST)
    with pytest.raises(error, match=complaint):
        play(store, "p", **({"shown": [1]} | changes))
    assert values(store) == {"a": 0}
    assert rows(path, "SELECT * FROM plays") == rows(path, "SELECT * FROM credits") == []
    play(store, "p", [1])
    assert values(store) == {"a": 0.5}


# Visits


def test_visits_by_hand(store):
    def visited(key, scope="task"):
        return visit(store, scope, "state", key, threshold=0.7)

    assert [visited(EAST) for _ in range(3)] == [1, 2, 3]
    assert visited(NORTH) == 1
    assert visited(BETWEEN) == 5  # near both: 3 + 1 visits and this one, counted for EAST, the first of two equals
    assert visited(EAST) == 5
    assert visited(NORTH) == 2
    assert visited(EAST, "other") == 1


@given(st.randoms())
@settings(max_examples=30)
def test_the_order_of_visits_changes_nothing(random):
    """Also where similarity is not transitive: EAST and NORTH are near BETWEEN, and not near each other."""
    keys = {"a": EAST, "b": BETWEEN, "c": NORTH}
    visits = [Visit(scope, state, key) for scope in "xy" for state, key in keys.items()] * 3
    stored = []
    for _ in range(2):
        random.shuffle(visits)
        with closing(open_store(":memory:")) as store:
            store.states.add_visits(visits, threshold=0.7)
            stored.append({(each.scope, each.state): store.states.count([each], threshold=0.7)[0] for each in visits})
    assert stored[0] == stored[1]


def test_visits_that_cannot_be_stored_leave_nothing(store):
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        store.states.add_visits([Visit("task", "a", EAST), Visit("task", "b", np.ones(2))], threshold=0.7)
    assert store.states.count([Visit("task", "", EAST)], threshold=0.7) == [0]


def test_visits_of_a_state_stop_growing_before_a_sum_could_overflow(path):
    """Of two states of the largest number of visits: n stays positive, and the file can still be written."""
    for state in ("east", "almost east"):
        with closing(open_store(path)) as store:
            visit(store, "task", state, EAST, threshold=1)
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE states SET visits = 2147483647")
    with closing(open_store(path)) as store:
        assert [visit(store, "task", "east", EAST, threshold=0.7) for _ in range(2)] == [2 * (2**31 - 1) + 1] * 2
