"""Which tips an episode was shown, and what their learned values become."""

import math
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from empo2.memory import ByScore, MemoryStore, Step

EAST, NORTH, UP = np.eye(3, dtype=np.float32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "memory.db"


@pytest.fixture
def store(path):
    with closing(MemoryStore(path, embedder="compass", dimension=3)) as store:
        yield store


def add(store, episode, *keys, scope="task", tip=None, **options):
    steps = [Step(f"s{i}", key, "look") for i, key in enumerate(keys)]
    store.add_episode(scope, episode, tip=tip or f"tip of {episode}", score=1.0, success=None, steps=steps, **options)


def play(store, episode, shown, reward, scope="task", learning_rate=0.5, score=7.0, success=None):
    store.record_play(
        scope,
        episode,
        score=score,
        success=success,
        searches=4,
        hits=3,
        shown=shown,
        reward=reward,
        learning_rate=learning_rate,
    )


def values(store, key=EAST, scope="task"):
    return {tip.episode: tip.value for tip in store.search(scope, key, ByScore(10, 0.5))}


def rows(path, query):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


def test_values_move_towards_the_reward(store, path):
    for episode in "abc":
        add(store, episode, EAST, NORTH)
    assert values(store) == {"a": 0, "b": 0, "c": 0}
    play(store, "p1", {1: 1, 2: 1}, reward=1.0)
    assert values(store) == {"a": 0.5, "b": 0.5, "c": 0}
    play(store, "p2", {1: 1}, reward=-1.0)
    assert values(store) == {"a": -0.25, "b": 0.5, "c": 0}
    play(store, "p3", {1: 1, 3: 1}, reward=2.0, learning_rate=0.25)
    assert values(store) == {"a": 0.3125, "b": 0.5, "c": 0.5}
    assert values(store, NORTH) == values(store)  # one value for all the states of a tip
    assert rows(path, "SELECT value FROM tips ORDER BY id") == [(0.3125,), (0.5,), (0.5,)]


def test_a_tip_that_has_helped_comes_before_a_newer_one_of_equal_score(store):
    """A true tip is written again, which is a duplicate; then one slip of the pen is a new text of the same score."""
    add(store, "true", EAST)
    play(store, "p1", {1: 1}, reward=1.0)
    add(store, "again", EAST, tip="tip of true")
    add(store, "slip", EAST)
    order = ["tip of true", "tip of slip"]
    assert [tip.text for tip in store.search("task", EAST, ByScore(2, 0.5))] == order
    play(store, "p2", {1: 1, 2: 1}, reward=0.0)  # shown together, they fail together
    assert [tip.text for tip in store.search("task", EAST, ByScore(2, 0.5))] == order


def test_a_tip_shown_in_many_turns_counts_once_and_the_turns_are_kept(store, path):
    add(store, "a", EAST)
    play(store, "p", {1: 30}, reward=1.0)
    assert values(store) == {"a": 0.5}
    assert rows(path, "SELECT * FROM credits") == [("p", 1, 30)]


def test_an_episode_is_recorded_once(store, path):
    add(store, "a", EAST)
    play(store, "p", {1: 1}, reward=1.0)
    play(store, "p", {1: 5, 2: 1}, reward=100.0, score=-1.0)
    assert values(store) == {"a": 0.5}
    assert rows(path, "SELECT episode, score FROM plays") == [("p", 7.0)]
    assert rows(path, "SELECT * FROM credits") == [("p", 1, 1)]


@pytest.mark.parametrize("success", [None, False, True])
def test_a_play_is_stored_as_given(store, path, success):
    play(store, "p", {}, reward=0.5, score=np.float32(-2.5), success=success)  # pyright: ignore[reportArgumentType]
    (play_,) = rows(path, "SELECT episode, scope, score, success, searches, hits FROM plays")
    assert play_ == ("p", "task", -2.5, success, 4, 3)


def test_dropped_tips_keep_their_credits_and_others_learn(store, path):
    for episode in "ab":
        add(store, episode, EAST)
    play(store, "p1", {1: 1, 2: 1}, reward=1.0)
    store.remove_tips([1])
    play(store, "p2", {1: 2, 2: 1}, reward=1.0)
    assert values(store) == {"b": 0.75}
    assert rows(path, "SELECT * FROM credits") == [("p1", 1, 1), ("p1", 2, 1), ("p2", 1, 2), ("p2", 2, 1)]
    add(store, "c", EAST)
    assert values(store) == {"c": 0, "b": 0.75}


def test_values_of_many_tips_survive_a_restart_and_eviction(path):
    with closing(MemoryStore(path, embedder="compass", dimension=3, capacity=4)) as store:
        for episode in "abc":
            add(store, episode, EAST, NORTH)  # a goes when c comes
        play(store, "p", {1: 1, 2: 1}, reward=1.0)
        assert values(store) == {"b": 0.5, "c": 0}
        add(store, "d", UP)  # b loses its first entry
        play(store, "q", {2: 1, 4: 1}, reward=0.0)
        expected = values(store, NORTH), values(store, UP)
        assert expected == ({"b": 0.25, "c": 0}, {"d": 0})
    with closing(MemoryStore(path, embedder="compass", dimension=3, capacity=4)) as store:
        assert (values(store, NORTH), values(store, UP)) == expected


def test_a_scope_that_was_not_searched_yet_learns_too(path):
    with closing(MemoryStore(path, embedder="compass", dimension=3)) as store:
        add(store, "a", EAST)
        add(store, "b", EAST, scope="other")
    with closing(MemoryStore(path, embedder="compass", dimension=3)) as store:
        play(store, "p", {2: 1}, reward=1.0, scope="other")
        assert (values(store), values(store, scope="other")) == ({"a": 0}, {"b": 0.5})
        play(store, "q", {2: 1}, reward=1.0, scope="other")
        assert (values(store), values(store, scope="other")) == ({"a": 0}, {"b": 0.75})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"score": math.nan}, "score of episode 'p' is nan"),
        ({"score": math.inf}, "score of episode 'p' is inf"),
        ({"reward": math.nan}, "reward of episode 'p' is nan"),
        ({"reward": -math.inf}, "reward of episode 'p' is -inf"),
    ],
)
def test_a_bad_play_is_named_and_leaves_nothing(store, path, changes, complaint):
    add(store, "a", EAST)
    with pytest.raises(ValueError, match=complaint):
        play(store, "p", {1: 1}, **({"reward": 1.0} | changes))
    assert values(store) == {"a": 0}
    assert rows(path, "SELECT * FROM plays") == rows(path, "SELECT * FROM credits") == []


def test_a_play_that_fails_half_way_leaves_nothing(store, path):
    add(store, "a", EAST)
    with pytest.raises(sqlite3.IntegrityError):
        play(store, "p", {1: 1, 2: None}, reward=1.0)
    assert values(store) == {"a": 0}
    assert rows(path, "SELECT * FROM plays") == rows(path, "SELECT * FROM credits") == []
    play(store, "p", {1: 1}, reward=1.0)
    assert values(store) == {"a": 0.5}
