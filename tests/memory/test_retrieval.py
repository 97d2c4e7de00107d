"""Ranking and novelty: by hand, and against plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory.index import ColumnTable, cosine_similarities, unit
from empo2.memory.novelty import count_visit
from empo2.memory.retrieval import best_by_score


def rank(similarities, scores, texts, k=10, min_similarity=0.5):
    arrays = np.array(similarities, np.float32), np.array(scores, np.float64), np.array(texts, np.int64)
    return best_by_score(*arrays, k=k, min_similarity=min_similarity).tolist()


def test_score_orders_and_similarity_only_admits():
    assert rank([0.6, 0.9, 0.4, 0.7], [3, 1, 9, 2], [0, 1, 2, 3]) == [0, 3, 1]


def test_similarity_must_exceed_the_minimum():
    assert rank([0.5, 0.5000001], [1, 1], [0, 1]) == [1]


def test_equal_scores_go_by_similarity_then_newest_first():
    assert rank([0.6, 0.8, 0.8, 0.7], [1, 1, 1, 1], [0, 1, 2, 3]) == [2, 1, 3, 0]


def test_an_episode_answers_once_with_its_most_similar_entry():
    assert rank([0.6, 0.9, 0.7, 0.8], [5, 5, 5, 1], [7, 7, 7, 8]) == [1, 3]


def test_equal_texts_answer_once_with_the_better_score():
    assert rank([0.9, 0.6, 0.8], [1, 4, 2], [7, 7, 8]) == [1, 2]


def test_k_limits_after_equal_texts_have_been_dropped():
    assert rank([0.9, 0.8, 0.7, 0.6], [3, 3, 2, 1], [7, 7, 8, 9], k=2) == [0, 2]


@pytest.mark.parametrize("similarities", [[], [0.1, -1.0]])
def test_nothing_similar_gives_nothing(similarities):
    assert rank(similarities, [0] * len(similarities), range(len(similarities))) == []


LEVELS = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 0.75, 1.0])  # few, so that ties abound
ROWS = st.lists(st.tuples(LEVELS, st.sampled_from([-100.0, 0.0, 7.0]), st.integers(0, 5)), max_size=30)


@given(ROWS, st.integers(0, 12), LEVELS)
@settings(max_examples=300, deadline=None)
def test_ranking_equals_plain_python(rows, k, min_similarity):
    expected, used = [], set()
    for row in sorted(range(len(rows)), key=lambda i: (rows[i][1], rows[i][0], i), reverse=True):
        similarity, _, text = rows[row]
        if similarity > min_similarity and text not in used:
            used.add(text)
            expected.append(row)
    columns = ([row[i] for row in rows] for i in range(3))
    assert rank(*columns, k=k, min_similarity=min_similarity) == expected[:k]


def test_a_state_similar_to_none_is_new():
    assert count_visit(np.array([], np.float32), np.array([], np.int64), threshold=0.5) == (None, 1)
    assert count_visit(np.array([0.5, 0.1]), np.array([4, 4]), threshold=0.5) == (None, 1)


def test_visits_of_all_similar_states_count_and_the_nearest_is_revisited():
    assert count_visit(np.array([0.6, 0.9, 0.2]), np.array([3, 5, 100]), threshold=0.5) == (1, 9)


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


@given(st.lists(st.one_of(st.just("append"), st.integers(0, 200)), max_size=400))
@settings(max_examples=50, deadline=None)
def test_column_table_equals_a_list(operations):
    table, expected, appended = ColumnTable(id=np.empty(0, np.int64), key=np.empty((0, 2), np.float32)), [], 0
    for operation in operations:
        if operation == "append":
            table.append(id=appended, key=[appended, -appended])
            expected.append(appended)
            appended += 1
        else:
            count = min(operation, len(expected))
            table.drop_oldest(count)
            del expected[:count]
        assert len(table) == len(expected)
        assert table["id"].tolist() == expected
        assert table["key"].tolist() == [[i, -i] for i in expected]
