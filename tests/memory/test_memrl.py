"""MemRL's checks of a memory, by hand: values against success, and how similar first states are."""

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from empo2.memory import MemoryFileError, MemoryStore, Step
from empo2.memory.browse import reading
from empo2.memory.predictions import Use, correlation, failures_among_best, uses_of_tips, value_bins
from empo2.memory.similarities import first_state_similarities

EAST, NORTH, UP = np.eye(3, dtype=np.float32)
ALL = ("a", "b")


def store_at(path: Path) -> MemoryStore:
    return MemoryStore(path, embedder="compass", dimension=3)


def add(store: MemoryStore, episode: str, *states: tuple[str, np.ndarray], scope: str = "a", success: bool = False):
    steps = [Step(state, key, "look") for state, key in states or (("s", EAST),)]
    store.add_episode(scope, episode, tip=f"tip of {episode}", score=0, success=success, steps=steps)


def play(store: MemoryStore, episode: str, shown: tuple[int, ...], score: float, scope: str = "a") -> None:
    store.record_play(
        scope,
        episode,
        score=score,
        success=score == 100,
        searches=1,
        hits=1,
        shown=dict.fromkeys(shown, 1),
        reward=score / 100,
        learning_rate=0.5,
    )


def test_each_use_counts_with_the_value_before_its_episode(tmp_path: Path) -> None:
    """Q of tip 1: 0, then 0.5 after a success, then 0.25 after a failure; of tip 2: 0, then 0."""
    with closing(store_at(tmp_path / "m.sqlite")) as store:
        for episode in "xyz":
            add(store, episode)
        play(store, "one", (1,), 100)
        play(store, "two", (1, 2), 0)
        play(store, "three", (1,), 100)
        play(store, "four", (3,), 100, scope="b")
    with reading(tmp_path / "m.sqlite") as db:
        uses = uses_of_tips(db, ALL, 0.5, lambda score: score / 100)
        assert uses == [(0.0, True), (0.5, False), (0.0, False), (0.25, True), (0.0, True)]
        assert uses_of_tips(db, ["b"], 0.5, lambda score: score / 100) == [(0.0, True)]
        with pytest.raises(MemoryFileError, match=r"tip 1 has the value 0.625, but its uses make it 0.4"):
            uses_of_tips(db, ALL, 0.3, lambda score: score / 100)  # 0.3, 0.21, 0.447


def test_values_in_bins() -> None:
    """Of 0 to 1 in four bins: two uses in the first, none in the second, one on the border of the last two."""
    uses = [Use(0.0, False), Use(0.1, True), Use(0.75, True), Use(1.0, True), Use(0.6, False)]
    assert value_bins(uses, 4) == [
        (0.0, 0.25, 2, pytest.approx(0.05), 0.5),
        (0.5, 0.75, 1, 0.6, 0.0),
        (0.75, 1.0, 2, 0.875, 1.0),
    ]
    ((_, _, number, value, success),) = value_bins([Use(0.0, True), Use(0.0, False)])
    assert (number, value, success) == (2, 0, 0.5)


def test_correlation_by_hand() -> None:
    """Deviations (-1, 0, 1) and (-1, 1, 0): the sum of products is 1, both norms sqrt(2)."""
    assert correlation([(1, 0), (2, 2), (3, 1)]) == pytest.approx(0.5)
    assert math.isnan(correlation([(1, 0), (1, 1)]))
    assert math.isnan(correlation([(1, 0)]))


def test_failures_among_the_best_tips(tmp_path: Path) -> None:
    """Twenty tips of the values 0 to 19: the best tenth are 18, from a failure, and 19; equals of 18 join them."""
    with closing(store_at(tmp_path / "m.sqlite")) as store:
        for number in range(20):
            add(store, f"e{number}", success=number in (3, 19))
            play(store, f"p{number}", (number + 1,), 100 * number)
    with reading(tmp_path / "m.sqlite") as db:
        assert failures_among_best(db, ALL) == 0.5
        assert math.isnan(failures_among_best(db, ["other"]))
    with closing(store_at(tmp_path / "m.sqlite")) as store:
        add(store, "equal")
        play(store, "p20", (21,), 1800)
    with reading(tmp_path / "m.sqlite") as db:
        assert failures_among_best(db, ALL) == pytest.approx(2 / 3)


def test_similarities_of_first_states(tmp_path: Path) -> None:
    """Cosines 0 and twice sqrt(1/2); equal texts and later steps do not count."""
    half = (EAST + NORTH) / math.sqrt(2)
    with closing(store_at(tmp_path / "m.sqlite")) as store:
        add(store, "one", ("e", EAST), ("later", UP))
        add(store, "two", ("n", NORTH), ("later", UP), scope="b")
        add(store, "three", ("half", half), scope="b")
        add(store, "four", ("e", EAST), scope="b")
    with reading(tmp_path / "m.sqlite") as db:
        found = first_state_similarities(db, ALL)
        assert (found.states, found.pairs) == (3, 3)
        assert found.mean == pytest.approx(2 / 3 * math.sqrt(0.5))
        assert found.deviation == pytest.approx(math.sqrt(0.5 * 2 / 3 - 0.5 * 4 / 9))
        assert found.threshold == pytest.approx(math.sqrt(0.5))
        with pytest.raises(MemoryFileError, match="it has 1 first states"):
            first_state_similarities(db, ["a"])


def test_a_fifth_of_the_pairs_is_above_the_threshold(tmp_path: Path) -> None:
    with closing(store_at(tmp_path / "m.sqlite")) as store:
        for degrees in range(0, 90, 9):  # cosines of the differences: 9 of 9 degrees, 8 of 18, ..., 1 of 81
            angle = math.radians(degrees)
            key = np.array([math.cos(angle), math.sin(angle), 0], np.float32)
            add(store, f"e{degrees}", (f"at {degrees}", key))
    with reading(tmp_path / "m.sqlite") as db:
        # 45 pairs, of which nine are closest: 0.8 * 44 = 35.2 of the way, between 18 and 9 degrees
        expected = 0.8 * math.cos(math.radians(18)) + 0.2 * math.cos(math.radians(9))
        assert first_state_similarities(db, ALL).threshold == pytest.approx(expected, abs=1e-6)
