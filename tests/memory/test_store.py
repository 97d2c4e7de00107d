"""The store: what goes in comes out, in the right scope, also after a restart."""

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory import ByScore, BySimilarity, MemoryStore, Step, Visit

from .visits import visit

EAST, NORTH, UP = np.eye(3, dtype=np.float32)
BETWEEN = (EAST + NORTH) / math.sqrt(2)  # cosine 0.707 to both


def open_store(path: str | Path, **changes) -> MemoryStore:
    return MemoryStore(path, **({"embedder": "compass", "dimension": 3} | changes))


@pytest.fixture
def store(tmp_path):
    with closing(open_store(tmp_path / "memory.db")) as store:
        yield store


def add(store, episode, *steps, scope="task", tip=None, score=1.0, success=None):
    """Store an episode whose steps are (state, key) or (state, key, action)."""
    steps = [Step(step[0], step[1], step[2] if len(step) > 2 else "look") for step in steps]
    return store.add_episode(scope, episode, tip=tip or f"tip of {episode}", score=score, success=success, steps=steps)


def search(store, key, scope="task", k=10, min_similarity=0.5):
    return store.search(scope, key, ByScore(k, min_similarity))


def found(store, key, **options):
    return [tip.episode for tip in search(store, key, **options)]


def test_a_tip_is_found_by_the_state_nearest_to_the_query(store):
    assert add(store, "e", ("start", EAST, "go"), ("end", NORTH, "stop"), score=-3.5, success=False) == 2
    (tip,) = search(store, NORTH)
    assert (tip.episode, tip.text, tip.action, tip.score, tip.success) == ("e", "tip of e", "stop", -3.5, False)
    assert tip.similarity == pytest.approx(1)
    assert search(store, UP) == []


@pytest.mark.parametrize("success", [None, False, True])
def test_success_comes_back_as_given(store, success):
    add(store, "e", ("s", EAST), success=success)
    assert search(store, EAST)[0].success is success


def test_search_orders_by_score_and_limits(store):
    for episode, key, score in [("near", EAST, 1), ("far", BETWEEN, 3), ("middle", EAST, 2), ("off", UP, 9)]:
        add(store, episode, (episode, key), score=score)
    assert found(store, EAST) == ["far", "middle", "near"]
    assert found(store, EAST, k=2) == ["far", "middle"]
    assert found(store, EAST, min_similarity=0.8) == ["middle", "near"]


def test_equal_score_and_similarity_give_the_newest_first(store):
    for episode in "abc":
        add(store, episode, ("s", EAST))
    assert found(store, EAST) == ["c", "b", "a"]


def test_a_cosine_of_exactly_the_minimum_is_not_enough(tmp_path):
    with closing(open_store(tmp_path / "m.db", dimension=4)) as store:
        add(store, "e", ("s", np.full(4, 0.5)))
        assert found(store, np.eye(4)[0], min_similarity=0.5) == []
        assert found(store, np.eye(4)[0], min_similarity=0.499) == ["e"]


def test_an_episode_answers_once_and_so_does_a_text(store):
    add(store, "long", *[(f"s{i}", EAST) for i in range(30)], score=2)
    add(store, "worse", ("s", EAST), tip="same words", score=0)
    add(store, "better", ("s", EAST), tip="same words", score=1)
    assert found(store, EAST) == ["long", "better"]


@pytest.mark.parametrize("policy", [ByScore(2, 0.5), BySimilarity(2, 0.5)])
def test_excluded_texts_make_room_for_others(store, policy):
    """The best of the tips that are not excluded, each with its own id."""
    for number, episode in enumerate("abcd"):
        add(store, episode, ("s", EAST), ("t", EAST), score=number, tip="same words" if episode in "bc" else None)
    before = store.search("task", EAST, policy)
    assert [tip.text for tip in before] == ["tip of d", "same words"]
    others = store.search("task", EAST, policy, exclude=["tip of d", "never stored"])
    assert [tip.text for tip in others] == ["same words", "tip of a"]
    assert others[0] == before[1]
    assert store.search("task", EAST, policy, exclude={tip.text for tip in [*before, *others]}) == []


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.integers(1, 4), st.randoms())
@settings(max_examples=50, deadline=None)
def test_a_search_with_exclusions_is_one_in_a_memory_without_those_tips(excluded, k, random):
    episodes = [(name, random.choice([EAST, BETWEEN, NORTH]), random.randint(0, 2)) for name in "abcdefgh"]
    with closing(open_store(":memory:")) as whole, closing(open_store(":memory:")) as part:
        for name, key, score in episodes:
            add(whole, name, (name, key), score=score)
            if name not in excluded:
                add(part, name, (name, key), score=score)
        found = whole.search("task", EAST, ByScore(k, 0.5), exclude=[f"tip of {name}" for name in excluded])
        assert [tip.episode for tip in found] == [tip.episode for tip in part.search("task", EAST, ByScore(k, 0.5))]


def test_keys_need_not_come_normalised(store):
    add(store, "e", ("s", 7 * EAST))
    assert search(store, 0.1 * BETWEEN)[0].similarity == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("variation", [0, 4, 5, 29, 1000, "unseen", "", "a/b'; --", "état 日本"])
def test_any_task_variation_is_a_scope(store, variation):
    # The authors' code keeps one list per id and raises KeyError from variation 5 on.
    assert found(store, EAST, scope=f"boil/{variation}") == []
    add(store, "e", ("s", EAST), scope=f"boil/{variation}")
    assert found(store, EAST, scope=f"boil/{variation}") == ["e"]
    assert store.scopes() == [f"boil/{variation}"]


def test_exact_duplicates_are_dropped(store):
    assert add(store, "a", ("s", EAST), ("s", EAST), ("s", EAST, "other action"), tip="t") == 2
    assert add(store, "b", ("s", EAST), tip="t") == 0
    assert (store.size(), store.entries()) == (1, 2)
    assert add(store, "c", ("s", EAST), ("new", EAST), tip="t") == 1
    assert add(store, "d", ("s", EAST), tip="t", score=2) == 1
    assert add(store, "e", ("s", EAST), tip="other") == 1
    assert add(store, "f", ("s", EAST), tip="t", scope="elsewhere") == 1
    assert (store.size(), store.entries()) == (5, 6)


def test_storing_an_episode_twice_changes_nothing(store):
    assert add(store, "e", ("s", EAST)) == 1
    assert add(store, "e", ("other", NORTH), tip="other", score=5) == 0
    assert (store.size(), store.entries()) == (1, 1)
    assert search(store, EAST)[0].text == "tip of e"


def test_an_episode_without_steps_stores_nothing(store):
    assert add(store, "e") == 0
    assert store.size() == 0


def test_the_oldest_entries_give_way_within_their_scope(tmp_path):
    with closing(open_store(tmp_path / "m.db", capacity=3)) as store:
        add(store, "elsewhere", ("s", EAST), scope="other")
        add(store, "a", ("s0", EAST), ("s1", NORTH))
        add(store, "b", ("s2", EAST))
        add(store, "c", ("s3", EAST))  # a's first step goes
        assert found(store, EAST) == ["c", "b"]
        assert found(store, NORTH) == ["a"]
        add(store, "d", ("s4", UP))  # a's last step goes, and a with it
        assert found(store, NORTH) == []
        assert (store.size("task"), store.entries("task")) == (3, 3)
        assert (store.size("other"), store.entries("other"), store.size()) == (1, 1, 4)
        assert add(store, "long", *[(f"t{i}", UP, f"{i}") for i in range(5)]) == 3
        assert [(tip.episode, tip.action) for tip in search(store, UP)] == [("long", "4")]
        assert (store.size("task"), store.entries("task")) == (1, 3)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tip": " \n"}, "tip of episode 'e' is empty"),
        ({"score": math.nan}, "score of episode 'e' is nan"),
        ({"score": -math.inf}, "score of episode 'e' is -inf"),
        ({"value": math.nan}, "value of episode 'e' is nan"),
        ({"steps": [Step("s", EAST, "a"), Step("s", np.ones(2), "a")]}, r"key has shape \(2,\)"),
        ({"tip": "\ud800"}, "surrogates"),
        ({"steps": [Step("s", EAST, "a"), Step("\ud800", EAST, "a")]}, "surrogates"),
    ],
)
def test_a_bad_episode_is_named_and_leaves_nothing(store, changes, complaint):
    episode = {"tip": "t", "score": 1.0, "success": None, "steps": [Step("s", EAST, "a")]}
    with pytest.raises(ValueError, match=complaint):
        store.add_episode("task", "e", **(episode | changes))
    assert (store.size(), store.entries(), found(store, EAST)) == (0, 0, [])
    assert store.add_episode("task", "e", **episode) == 1


def test_numpy_scores_are_stored_as_numbers(store):
    add(store, "e", ("s", EAST), score=np.float32(0.5))  # pyright: ignore[reportArgumentType]
    assert search(store, EAST)[0].score == 0.5


def test_capacity_must_hold_something(tmp_path):
    with pytest.raises(ValueError, match="capacity is 0"):
        open_store(tmp_path / "m.db", capacity=0)


def test_learned_value_and_time_can_be_given(store, tmp_path):
    steps = [Step("s", EAST, "a")]
    store.add_episode("task", "e", tip="t", score=1, success=None, steps=steps, value=0.25, created=1e9)
    assert search(store, EAST)[0].value == 0.25
    with closing(sqlite3.connect(tmp_path / "memory.db")) as reader:
        assert reader.execute("SELECT created, value FROM tips").fetchall() == [(1e9, 0.25)]


def test_the_last_entries_of_a_tip_keep_it_however_many_tips_give_way(tmp_path):
    with closing(open_store(tmp_path / "m.db", capacity=6)) as store:
        for episode in "abc":
            add(store, episode, ("s", EAST, f"{episode}1"), ("t", EAST, f"{episode}2"))
        add(store, "d", ("s", EAST, "d1"), ("t", EAST, "d2"), ("u", EAST, "d3"))  # a goes, and half of b
        assert (store.size(), store.entries()) == (3, 6)
        assert [(tip.episode, tip.action) for tip in search(store, EAST)] == [("d", "d3"), ("c", "c2"), ("b", "b2")]
        add(store, "e", ("s", EAST, "e1"), ("t", EAST, "e2"), ("u", EAST, "e3"), ("v", EAST, "e4"))  # b, c and d1
        assert (found(store, EAST), store.entries()) == (["e", "d"], 6)
    with closing(open_store(tmp_path / "m.db", capacity=2)) as store:  # smaller than what it holds
        assert (found(store, EAST), store.entries()) == (["e", "d"], 6)
        add(store, "f", ("s", EAST))
        assert (found(store, EAST), store.entries()) == (["f", "e"], 2)


def test_an_id_is_never_used_again(store):
    add(store, "a", ("s", EAST))
    add(store, "b", ("s", EAST))
    first, second = sorted(tip.id for tip in search(store, EAST))
    assert store.remove_tips([second]) == 1
    add(store, "c", ("s", EAST))
    assert search(store, EAST)[0].id > second
    assert search(store, EAST)[1].id == first


def test_removed_tips_are_not_found_and_their_entries_are_gone(tmp_path):
    with closing(open_store(tmp_path / "m.db")) as store:
        for episode in "abc":
            add(store, episode, ("s", EAST), ("t", NORTH))
        add(store, "elsewhere", ("s", EAST), scope="other")
        ids = {tip.episode: tip.id for tip in search(store, EAST)}
        (other,) = search(store, EAST, scope="other")
        assert store.remove_tips([]) == 0
        assert store.remove_tips({ids["b"], ids["a"], 999}) == 2
        assert (found(store, EAST), found(store, NORTH), store.entries()) == (["c"], ["c"], 3)
        assert store.remove_tips([ids["a"]]) == 0
        assert store.remove_tips([other.id]) == 1
        assert found(store, EAST, scope="other") == []
        add(store, "d", ("s", EAST))
        assert found(store, EAST) == ["d", "c"]
    with closing(open_store(tmp_path / "m.db")) as store:
        assert found(store, EAST) == ["d", "c"]
        assert store.entries() == 3


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
@settings(max_examples=30, deadline=None)
def test_the_order_of_visits_changes_nothing(random):
    """Also where similarity is not transitive: EAST and NORTH are near BETWEEN, and not near each other."""
    keys = {"a": EAST, "b": BETWEEN, "c": NORTH}
    visits = [Visit(scope, state, key) for scope in "xy" for state, key in keys.items()] * 3
    stored = []
    for _ in range(2):
        random.shuffle(visits)
        with closing(open_store(":memory:")) as store:
            store.states.add_visits(visits, threshold=0.7)
            stored.append([store.states.count(s, k, threshold=0.7) for s in "xy" for k in (EAST, BETWEEN, NORTH)])
    assert stored[0] == stored[1]


def test_a_visit_that_cannot_be_stored_leaves_no_other(store):
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        store.states.add_visits([Visit("task", "a", EAST), Visit("task", "b", np.ones(2))], threshold=0.7)
    assert store.states.count("task", EAST, threshold=0.7) == 0


def test_visits_are_added_to_a_state_known_word_for_word(tmp_path):
    with closing(open_store(tmp_path / "m.db")) as store:
        store.states.add("task", "east", EAST, 3)
        store.states.add("task", "almost east", EAST, 10)  # the same key, another state
        store.states.add("task", "east", NORTH, 4)  # the key of the known state stays
        store.states.add("other", "east", EAST, 100)
        assert visit(store, "task", "east", EAST, threshold=0.7) == 18
        assert visit(store, "task", "north", NORTH, threshold=0.7) == 1
    with closing(sqlite3.connect(tmp_path / "m.db")) as db:
        rows = db.execute("SELECT scope, state, visits FROM states ORDER BY id").fetchall()
    assert rows == [("task", "east", 8), ("task", "almost east", 10), ("other", "east", 100), ("task", "north", 1)]


def test_visits_of_a_state_stop_growing_before_a_sum_could_overflow(store):
    """A hundred imports of the largest export: n stays positive, and the file can still be written."""
    for _ in range(100):
        store.states.add("task", "east", EAST, 2**31 - 1)
    store.states.add("task", "almost east", EAST, 2**31 - 1)
    assert store.states.count("task", EAST, threshold=0.7) == 2 * (2**31 - 1)
    assert visit(store, "task", "east", EAST, threshold=0.7) == 2 * (2**31 - 1) + 1
    with pytest.raises(ValueError, match="12001 characters"):
        store.add_episode("task", "e", tip="x" * 12_001, score=1, success=True, steps=[])


def test_a_state_without_visits_is_refused(store):
    with pytest.raises(ValueError, match="state 'east' has 0 visits"):
        store.states.add("task", "east", EAST, 0)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        store.states.add("task", "east", np.ones(2), 1)
    assert visit(store, "task", "east", EAST, threshold=0.7) == 1


def test_visits_grow_past_every_buffer(tmp_path):
    with closing(open_store(tmp_path / "m.db", dimension=300)) as store:
        for visits in (1, 2):
            for number, key in enumerate(np.eye(300)):
                assert visit(store, "task", f"{number}", key, threshold=0.5) == visits


def fill(store):
    random = np.random.default_rng(0)
    for number in range(20):
        keys = random.normal(size=(4, 3))
        add(store, f"e{number}", *[(f"s{i}", key) for i, key in enumerate(keys)], score=number % 5)
        visit(store, "task", f"s{number}", keys[0], threshold=0.9)


def answers(store):
    queries = np.random.default_rng(1).normal(size=(10, 3))
    return [search(store, query) for query in queries], store.size(), store.entries(), store.scopes()


def test_memory_survives_a_restart(tmp_path):
    with closing(open_store(tmp_path / "m.db", capacity=50)) as store:
        fill(store)
        before = answers(store)
    with closing(open_store(tmp_path / "m.db", capacity=50)) as store:
        assert answers(store) == before
        with closing(open_store(tmp_path / "never-closed.db", capacity=50)) as other:
            fill(other)
            for key in np.random.default_rng(2).normal(size=(20, 3)):
                assert visit(store, "task", "s", key, threshold=0.9) == visit(other, "task", "s", key, threshold=0.9)
