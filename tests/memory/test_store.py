"""The store: what goes in comes out, in the right scope, also after a restart."""

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import empo2.memory
from empo2.memory import MemoryFileError, MemoryStore, Step

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


def found(store, key, scope="task", **options):
    return [tip.episode for tip in store.search(scope, key, **options)]


def test_exported_names():
    assert empo2.memory.__all__ == [
        "BatchingEmbedder",
        "Embedder",
        "EmbedderError",
        "MemoryFileError",
        "MemoryStore",
        "SentenceEmbedder",
        "Step",
        "Tip",
    ]


def test_a_tip_is_found_by_the_state_nearest_to_the_query(store):
    assert add(store, "e", ("start", EAST, "go"), ("end", NORTH, "stop"), score=-3.5, success=False) == 2
    (tip,) = store.search("task", NORTH)
    assert (tip.episode, tip.text, tip.action, tip.score, tip.success) == ("e", "tip of e", "stop", -3.5, False)
    assert tip.similarity == pytest.approx(1)
    assert store.search("task", UP) == []


@pytest.mark.parametrize("success", [None, False, True])
def test_success_comes_back_as_given(store, success):
    add(store, "e", ("s", EAST), success=success)
    assert store.search("task", EAST)[0].success is success


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


def test_keys_need_not_come_normalised(store):
    add(store, "e", ("s", 7 * EAST))
    assert store.search("task", 0.1 * BETWEEN)[0].similarity == pytest.approx(math.sqrt(0.5))


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
    assert store.search("task", EAST)[0].text == "tip of e"


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
        assert [(tip.episode, tip.action) for tip in store.search("task", UP)] == [("long", "4")]
        assert (store.size("task"), store.entries("task")) == (1, 3)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tip": " \n"}, "tip of episode 'e' is empty"),
        ({"score": math.nan}, "score of episode 'e' is nan"),
        ({"score": -math.inf}, "score of episode 'e' is -inf"),
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
    assert store.search("task", EAST)[0].score == 0.5


def test_capacity_must_hold_something(tmp_path):
    with pytest.raises(ValueError, match="capacity is 0"):
        open_store(tmp_path / "m.db", capacity=0)


def test_visits_by_hand(store):
    def visit(key, scope="task"):
        return store.visit(scope, "state", key, threshold=0.7)

    assert [visit(EAST) for _ in range(3)] == [1, 2, 3]
    assert visit(NORTH) == 1
    assert visit(BETWEEN) == 5  # near both: 3 + 1 visits and this one, counted for EAST, the first of two equals
    assert visit(EAST) == 5
    assert visit(NORTH) == 2
    assert visit(EAST, "other") == 1


def test_visits_grow_past_every_buffer(tmp_path):
    with closing(open_store(tmp_path / "m.db", dimension=300)) as store:
        for visits in (1, 2):
            for number, key in enumerate(np.eye(300)):
                assert store.visit("task", f"{number}", key, threshold=0.5) == visits


def fill(store):
    random = np.random.default_rng(0)
    for number in range(20):
        keys = random.normal(size=(4, 3))
        add(store, f"e{number}", *[(f"s{i}", key) for i, key in enumerate(keys)], score=number % 5)
        store.visit("task", f"s{number}", keys[0], threshold=0.9)


def answers(store):
    queries = np.random.default_rng(1).normal(size=(10, 3))
    return [store.search("task", query) for query in queries], store.size(), store.entries(), store.scopes()


def test_memory_survives_a_restart(tmp_path):
    with closing(open_store(tmp_path / "m.db", capacity=50)) as store:
        fill(store)
        before = answers(store)
    with closing(open_store(tmp_path / "m.db", capacity=50)) as store:
        assert answers(store) == before
        with closing(open_store(tmp_path / "never-closed.db", capacity=50)) as other:
            fill(other)
            for key in np.random.default_rng(2).normal(size=(20, 3)):
                assert store.visit("task", "s", key, threshold=0.9) == other.visit("task", "s", key, threshold=0.9)


def test_a_snapshot_is_a_memory_of_its_own(store, tmp_path):
    fill(store)
    before = answers(store)
    target = tmp_path / "snapshot.db"
    store.snapshot(target)
    store.snapshot(target)
    add(store, "later", ("s", EAST), score=100)
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == ["snapshot.db"]
    with closing(open_store(target)) as copy:
        assert answers(copy) == before
        add(copy, "only here", ("s", EAST), score=100)
    assert found(store, EAST, k=1) == ["later"]


def test_going_back_to_a_snapshot_does_not_replay_what_a_killed_process_left(tmp_path):
    live, kept = tmp_path / "live.db", tmp_path / "kept.db"
    store = open_store(live)
    add(store, "before", ("s", EAST))
    store.snapshot(kept)
    add(store, "after", ("s", EAST))
    left = {path: path.read_bytes() for path in tmp_path.glob("live.db*")}  # as a SIGKILL would leave them
    store.close()
    for path, content in left.items():
        path.write_bytes(content)
    assert live.with_name("live.db-wal").stat().st_size > 0

    with closing(open_store(kept)) as snapshot:
        snapshot.snapshot(live)
    with closing(open_store(live)) as store:
        assert found(store, EAST) == ["before"]


def test_a_snapshot_onto_itself_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match="another path"):
        store.snapshot(tmp_path / "." / "memory.db")


def test_others_can_read_while_the_store_is_open(store, tmp_path):
    add(store, "e", ("s", EAST))
    with closing(sqlite3.connect(tmp_path / "memory.db")) as reader:
        assert reader.execute("SELECT episode FROM tips").fetchall() == [("e",)]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"embedder": "sundial"}, r"'compass' \(3 dimensions\).*now 'sundial' \(3\)"),
        ({"dimension": 4}, r"'compass' \(3 dimensions\).*now 'compass' \(4\)"),
    ],
)
def test_a_file_of_another_embedder_is_refused(tmp_path, changes, complaint):
    open_store(tmp_path / "m.db").close()
    with pytest.raises(MemoryFileError, match=f"m.db: .*{complaint}"):
        open_store(tmp_path / "m.db", **changes)


def test_a_file_of_a_newer_schema_is_refused(tmp_path):
    open_store(tmp_path / "m.db").close()
    with closing(sqlite3.connect(tmp_path / "m.db")) as db, db:
        db.execute("UPDATE meta SET value = 2 WHERE key = 'schema'")
    with pytest.raises(MemoryFileError, match=r"m.db: has memory schema 2; .* schema 1"):
        open_store(tmp_path / "m.db")


def test_foreign_files_are_refused_and_left_as_they_were(tmp_path):
    text, other = tmp_path / "notes.txt", tmp_path / "other.db"
    text.write_text("not a database, and long enough to be looked at" * 10)
    with closing(sqlite3.connect(other)) as db, db:
        db.execute("CREATE TABLE contacts (name)")
    before = text.read_bytes(), other.read_bytes()
    with pytest.raises(MemoryFileError, match=r"notes.txt: .*not a database"):
        open_store(text)
    with pytest.raises(MemoryFileError, match=r"other.db: .*not a memory file"):
        open_store(other)
    with pytest.raises(MemoryFileError, match=r"m.db: .*unable to open"):
        open_store(tmp_path / "absent" / "m.db")
    assert (text.read_bytes(), other.read_bytes()) == before


STEP = st.tuples(st.sampled_from(["s0", "s1", "s2"]), st.integers(0, 5), st.sampled_from(["go", "look"]))
EPISODE = st.tuples(
    st.sampled_from(["x", "y"]), st.sampled_from(["t0", "t1", "t2"]), st.sampled_from([0.0, 1.0]), st.lists(STEP)
)
KEYS = np.random.default_rng(3).normal(size=(6, 3)).astype(np.float32)
KEYS /= np.linalg.norm(KEYS, axis=1, keepdims=True)


@given(st.lists(EPISODE, max_size=8), st.integers(1, 6), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_any_history_gives_what_plain_python_gives_and_scopes_never_mix(episodes, capacity, query):
    """Two scopes in one store, against a list per scope."""
    lists = {"x": [], "y": []}
    with closing(open_store(":memory:", capacity=capacity)) as store:
        for number, (scope, tip, score, steps) in enumerate(episodes):
            rows = [(tip, score, state, action) for state, _, action in steps]
            held = [row[:4] for row in lists[scope]]
            new = [i for i, row in enumerate(rows) if row not in held and row not in rows[:i]][-capacity:]
            stored = add(
                store, f"e{number}", *[(s, KEYS[k], a) for s, k, a in steps], scope=scope, tip=tip, score=score
            )
            assert stored == len(new)
            lists[scope] = (lists[scope] + [(*rows[i], steps[i][1], f"e{number}") for i in new])[-capacity:]
        for scope, rows in lists.items():
            expected, used = [], set()
            similarity = [float(np.vecdot(KEYS[row[4]], KEYS[query])) for row in rows]
            for i in sorted(range(len(rows)), key=lambda i: (rows[i][1], similarity[i], i), reverse=True):
                if similarity[i] > 0.5 and rows[i][0] not in used:
                    used.add(rows[i][0])
                    expected.append((rows[i][5], rows[i][3]))
            found = [(tip.episode, tip.action) for tip in store.search(scope, KEYS[query])]
            assert found == expected
            assert store.entries(scope) == len(rows)
            assert store.size(scope) == len({row[5] for row in rows})
