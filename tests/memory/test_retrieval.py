"""Ranking and novelty: by hand, and against plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory import AtRandom, ByScore, BySimilarity, Policy
from empo2.memory.index import ColumnTable, cosine_similarities, unit
from empo2.memory.retrieval import Entries


def rng(seed):
    return np.random.default_rng(seed)


def entries(similarities, scores=None, values=None, texts=None) -> Entries:
    """Entries of different texts and of zero score and value, where nothing else is given."""
    n = len(similarities)
    return Entries(
        np.array(similarities, np.float32),
        np.array([0] * n if scores is None else scores, np.float64),
        np.array([0] * n if values is None else values, np.float64),
        np.array(range(n) if texts is None else texts, np.int64),
    )


@pytest.mark.parametrize(
    ("policy", "columns", "found"),
    [
        # score orders, and similarity only admits
        (ByScore(9, 0.5), entries([0.6, 0.9, 0.4, 0.7], [3, 1, 9, 2]), [0, 3, 1]),
        # equal scores go by similarity, then value, then newest first
        (ByScore(9, 0.5), entries([0.6, 0.8, 0.8, 0.7]), [2, 1, 3, 0]),
        (ByScore(9, 0.5), entries([0.8] * 4, [1, 2, 2, 1], values=[9, 0, -1, 0]), [1, 2, 0, 3]),
        # a text answers once, with its better score, then its most similar entry; k limits after that
        (ByScore(9, 0.5), entries([0.6, 0.9, 0.7, 0.8], [5, 5, 5, 1], texts=[7, 7, 7, 8]), [1, 3]),
        (ByScore(2, 0.5), entries([0.9, 0.8, 0.7, 0.6], [3, 3, 2, 1], texts=[7, 7, 8, 9]), [0, 2]),
        # similarity orders, then score, then newest first; of a text the nearest entry answers, whatever the scores
        (BySimilarity(9, 0.5), entries([0.7, 0.9, 0.7, 0.7, 0.5], [1, 0, 2, 2, 9]), [1, 3, 2, 0]),
        (BySimilarity(9, 0.0), entries([0.7, 0.9, 0.8], [9, 1, 1], texts=[4, 4, 5]), [1, 2]),
    ],
)
def test_rankings_by_hand(policy: Policy, columns: Entries, found: list[int]):
    assert policy(columns).tolist() == found


def test_random_tips_are_drawn_from_all_texts_alike():
    """Three texts, of one, two and four entries: each is drawn in 2/3 of 3,000 draws of two, within five deviations."""
    columns = entries([0.1] * 7, texts=[5, 6, 6, 7, 7, 7, 7])
    policy = AtRandom(2, rng(0))
    drawn = [columns.texts[policy(columns)].tolist() for _ in range(3000)]
    assert all(len(set(texts)) == 2 for texts in drawn)
    for text in (5, 6, 7):
        assert sum(text in texts for texts in drawn) == pytest.approx(2000, abs=5 * (3000 * 2 / 9) ** 0.5)
    assert sorted(columns.texts[AtRandom(9, rng(0))(columns)].tolist()) == [5, 6, 7]
    assert AtRandom(2, rng(0))(entries([])).tolist() == []


# Few levels, so that ties abound; uneven ones, so that different sums of z-scores are not equal by chance.
SIMILARITIES = (-1.0, 0.0, 0.25, 0.5, 0.53125, 0.75, 1.0)
SCORES = (-100.0, 0.0, 7.0)
VALUES = (-0.9, 0.0, 0.13, 0.71)
ROW = st.tuples(st.sampled_from(SIMILARITIES), st.sampled_from(SCORES), st.sampled_from(VALUES), st.integers(0, 5))
ROWS = st.one_of(
    st.lists(ROW, max_size=30),
    # Hundreds of rows, where not all are sorted.
    st.builds(
        lambda seed, n, levels, texts: [
            (SIMILARITIES[i % levels[0]], SCORES[j % levels[1]], VALUES[m % 4], t % texts)
            for i, j, m, t in rng(seed).integers(0, 10**6, (n, 4)).tolist()
        ],
        st.integers(0, 2**32),
        st.integers(200, 1500),
        st.tuples(st.integers(1, 7), st.integers(1, 3)),
        st.sampled_from([1, 2, 5, 1000]),
    ),
)


def plain(rows, order, k, admit):
    """Rows (similarity, score, value, text) as the definition reads: sort all, each text once, the first k."""
    found, used = [], set()
    for i in sorted(range(len(rows)), key=lambda i: (*order(rows[i]), i), reverse=True):
        if admit(rows[i][0]) and rows[i][3] not in used:
            used.add(rows[i][3])
            found.append(i)
    return found[:k]


@given(ROWS, st.integers(0, 12), st.sampled_from(SIMILARITIES))
@settings(max_examples=200)
def test_ranking_equals_plain_python(rows, k, minimum):
    columns = entries(*([row[i] for row in rows] for i in range(4)))

    def similar(similarity):
        return similarity > minimum

    assert ByScore(k, minimum)(columns).tolist() == plain(rows, lambda row: (row[1], row[0], row[2]), k, similar)
    assert BySimilarity(k, minimum)(columns).tolist() == plain(rows, lambda row: (row[0], row[1]), k, similar)


def test_equal_keys_have_equal_cosines_wherever_they_stand():
    random = np.random.default_rng(0)
    key, query = (unit(random.normal(size=384), 384) for _ in range(2))
    for rows in (1, 5, 7, 30, 1003):
        assert len(np.unique(cosine_similarities(np.tile(key, (rows, 1)), query))) == 1


@pytest.mark.parametrize(
    ("key", "complaint"),
    [([1, 0], r"shape \(2,\)"), ([0, 0, 0], "norm 0"), ([1, np.nan, 0], "norm nan"), ([np.inf, 0, 0], "norm inf")],
)
def test_unusable_keys_are_named(key, complaint):
    with pytest.raises(ValueError, match=complaint):
        unit(key, 3)


def test_a_column_table_that_grows_and_loses_its_oldest_rows_equals_a_list():
    table, expected = ColumnTable(id=np.empty(0, np.int64), key=np.empty((0, 2), np.float32)), []
    for number in range(60):
        new = [100 * number + i for i in range(number)]
        table.append(number, id=new, key=np.array([[i, -i] for i in new]).reshape(-1, 2))
        table.drop_oldest(oldest := min(len(expected), 3 * (number % 20)))
        expected = expected[oldest:] + new
        assert table["id"].tolist() == expected
        assert table["key"].tolist() == [[i, -i] for i in expected]
