"""MemRL: its ranking by hand and in plain Python; values against success, and how similar first states are."""

import math
from contextlib import closing
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_values import Use, correlation, failures_among_best, first_state_cosines, uses_of_tips, value_bins

from empo2.memory import MemoryFileError, Policy
from empo2.memory.file import reading
from empo2.recipe.baselines.memrl.retrieval import policy
from empo2.recipe.config import load_settings

from .stores import EAST, NORTH, UP, add, open_store, play
from .test_retrieval import ROWS, SIMILARITIES, entries, plain

ALL = ("a", "b")


def test_each_use_counts_with_the_value_before_its_episode(tmp_path: Path) -> None:
    """Q of tip 1: 0, then 0.5 after a success, then 0.25 after a failure; of tip 2: 0, then 0."""
    with closing(open_store(tmp_path / "m.sqlite")) as store:
        for episode in "xyz":
            add(store, episode, EAST, scope="a")
        for episode, shown, success in (("one", [1], True), ("two", [1, 2], False), ("three", [1], True)):
            play(store, episode, shown, scope="a", score=float(success), success=success)
        play(store, "four", [3], scope="b", success=True)
    with reading(tmp_path / "m.sqlite") as db:
        uses = uses_of_tips(db, ALL, 0.5, -1.0, 1.0)
        assert uses == [(0.0, True), (0.5, False), (0.0, False), (0.25, True), (0.0, True)]
        assert uses_of_tips(db, ["b"], 0.5, -1.0, 1.0) == [(0.0, True)]
        with pytest.raises(MemoryFileError, match=r"tip 1 has the value 0.625, but its uses make it 0.4"):
            uses_of_tips(db, ALL, 0.3, -1.0, 1.0)  # 0.3, 0.21, 0.447


def test_values_in_bins() -> None:
    """Of 0 to 1 in four bins: two uses in the first, none in the second, one on the border of the last two."""
    uses = [Use(0.0, False), Use(0.1, True), Use(0.75, True), Use(1.0, True), Use(0.6, False)]
    assert value_bins(uses, 4) == [
        (0.0, 0.25, 2, pytest.approx(0.05), 0.5),
        (0.5, 0.75, 1, 0.6, 0.0),
        (0.75, 1.0, 2, 0.875, 1.0),
    ]
    assert [each[2:] for each in value_bins([Use(0.0, True), Use(0.0, False)])] == [(2, 0, 0.5)]


def test_correlation_by_hand() -> None:
    """Deviations (-1, 0, 1) and (-1, 1, 0): the sum of products is 1, both norms sqrt(2)."""
    assert correlation([(1, 0), (2, 2), (3, 1)]) == pytest.approx(0.5)
    assert math.isnan(correlation([(1, 0), (1, 1)]))
    assert math.isnan(correlation([(1, 0)]))


def test_failures_among_the_best_tips(tmp_path: Path) -> None:
    """The best tenth of twenty tips is 19, from a success, and 18, from a failure; another 18 joins them."""
    with closing(open_store(tmp_path / "m.sqlite")) as store:
        for number, value in enumerate([*range(17), 18, 18, 19]):
            add(store, f"e{number}", EAST, scope="a", success=number in (3, 19))
            play(store, f"p{number}", [number + 1], scope="a", score=value)
    with reading(tmp_path / "m.sqlite") as db:
        assert failures_among_best(db, ALL) == pytest.approx(2 / 3)
        assert math.isnan(failures_among_best(db, ["other"]))


def test_similarities_of_first_states(tmp_path: Path) -> None:
    """Cosines 0 and twice sqrt(1/2); equal texts and later steps do not count."""
    half = (EAST + NORTH) / math.sqrt(2)
    with closing(open_store(tmp_path / "m.sqlite")) as store:
        add(store, "one", ("e", EAST), ("later", UP), scope="a")
        add(store, "two", ("n", NORTH), ("later", UP), scope="b")
        add(store, "three", ("half", half), scope="b")
        add(store, "four", ("e", EAST), scope="b")
    with reading(tmp_path / "m.sqlite") as db:
        states, cosines = first_state_cosines(db, ALL)
        assert (states, sorted(cosines)) == (3, pytest.approx([0, math.sqrt(0.5), math.sqrt(0.5)]))
        with pytest.raises(MemoryFileError, match="it has 1 first states"):
            first_state_cosines(db, ["a"])


# The ranking


SETTINGS = load_settings()


def by_value(**changes) -> Policy:
    of_tests = {"top_k": 3, "min_similarity": 0.5, "candidates": 5, "value_weight": 0.5, "exploration": 0.0}
    return policy(SETTINGS.model_copy(update={"memory": SETTINGS.memory.model_copy(update=of_tests | changes)}))


def test_value_with_fixed_statistics_of_the_similarities():
    """Candidates of nearly equal similarity: their own deviation, 0.01, is not blown up to 1.

    z(Q) is -1, 1 for both; z(similarity) is 1, -1 over the candidates, and 0.1, -0.1 by a deviation of 0.1.
    """
    columns = entries([0.72, 0.70], values=[0.0, 1.0])
    assert by_value(value_weight=0.4)(columns).tolist() == [0, 1]  # 0.6 - 0.4 > 0.4 - 0.6
    fixed = {"similarity_statistics": [0.71, 0.1]}
    assert by_value(value_weight=0.4, **fixed)(columns).tolist() == [1, 0]  # 0.4 - 0.06 > 0.06 - 0.4
    assert by_value(value_weight=0.05, **fixed)(columns).tolist() == [0, 1]  # 0.095 - 0.05 > 0.05 - 0.095


@pytest.mark.parametrize(
    ("settings", "similarities", "values", "texts", "found"),
    [
        # Similarities 0.6, 0.7, 0.8: z = -1.2247, 0, 1.2247. Values 4, 1, 1: z = 1.4142, -0.7071, -0.7071.
        ({}, [0.6, 0.7, 0.8], [4, 1, 1], None, [2, 0, 1]),  # 0.2588, 0.0948, -0.3536
        ({"value_weight": 0.6}, [0.6, 0.7, 0.8], [4, 1, 1], None, [0, 2, 1]),  # 0.3586, 0.0656, -0.4243
        ({"value_weight": 0.6, "top_k": 1}, [0.6, 0.7, 0.8], [4, 1, 1], None, [0]),
        ({"candidates": 3, "value_weight": 1.0}, [0.6, 0.9, 0.7, 0.8], [100, 1, 4, 1], None, [2, 1, 3]),
        ({"candidates": 1, "value_weight": 1.0}, [0.6, 0.9, 0.7, 0.8], [100, 1, 4, 1], None, [1]),
        # Of one text the nearest and newest entry is a candidate.
        ({"candidates": 2, "value_weight": 1.0}, [0.9, 0.9, 0.8, 0.7, 0.6], [1, 1, 1, 2, 9], [7, 7, 7, 8, 9], [3, 1]),
        # Of a state's notes, all are candidates: here those of the two states at 0.9 and 0.8.
        ({"candidates": 2, "value_weight": 1.0}, [0.9, 0.9, 0.9, 0.8, 0.7], [1, 9, 1, 5, 99], None, [1, 3, 2]),
        ({"candidates": 1, "value_weight": 1.0}, [0.9, 0.9000001, 0.9, 0.9], [9, 1, 1, 5], None, [0, 3, 1]),
        # Equal similarities leave it to the value.
        ({"value_weight": 0.3}, [0.7, 0.7, 0.7], [1, 3, 2], None, [1, 2, 0]),
        ({"value_weight": 1.0}, [0.7, 0.6], [0, 1e-200], None, [0, 1]),  # a spread too small to be squared is none
    ],
)
def test_value_ranks_candidates_by_hand(settings, similarities, values, texts, found):
    assert by_value(**settings)(entries(similarities, values=values, texts=texts)).tolist() == found


def test_exploration_draws_from_the_candidates_each_once_and_ranks_what_it_drew():
    similarities = [0.95, 0.94, 0.93, 0.92, 0.91, 0.9, 0.3, 0.3]
    rows = entries(similarities, values=range(8), texts=[1, 1, 2, 3, 4, 5, 6, 7])
    exploring = {"candidates": 4, "value_weight": 1.0, "exploration": 0.4}
    explore, again = by_value(**exploring), by_value(**exploring)
    drawn = [tuple(explore(rows).tolist()) for _ in range(1000)]
    # The candidates by value: rows 4, 3, 2, 0. Every choice of three comes up, always best first.
    assert set(drawn) == {(4, 3, 2), (4, 3, 0), (4, 2, 0), (3, 2, 0)}
    assert drawn.count((4, 3, 2)) == pytest.approx(1000 * (0.6 + 0.4 / 4), abs=70)  # five standard deviations
    assert drawn == [tuple(again(rows).tolist()) for _ in range(1000)]


def z_scores(values):
    spread = pstdev(values) if len(set(values)) > 1 else 0
    return [(value - fmean(values)) / spread if spread else 0 for value in values]


@given(ROWS, st.integers(0, 5), st.sampled_from(SIMILARITIES), st.integers(1, 8), st.sampled_from([0.0, 0.37, 1.0]))
@settings(max_examples=200)
def test_ranking_by_value_equals_plain_python(rows, k, minimum, candidates, weight):
    columns = entries(*([row[i] for row in rows] for i in range(4)))
    chosen = plain(rows, lambda row: row[:1], len(rows), lambda similarity: similarity >= minimum)
    states = sorted({rows[i][0] for i in chosen}, reverse=True)[:candidates]
    chosen = [i for i in chosen if rows[i][0] in states]
    ranks = zip(z_scores([rows[i][0] for i in chosen]), z_scores([rows[i][2] for i in chosen]), strict=True)
    ranked = sorted(
        ((round((1 - weight) * z + weight * q, 9), rows[i][0], i) for (z, q), i in zip(ranks, chosen, strict=True)),
        reverse=True,
    )
    found = by_value(top_k=k, min_similarity=minimum, candidates=candidates, value_weight=weight)(columns)
    assert found.tolist() == [i for *_, i in ranked[:k]]
