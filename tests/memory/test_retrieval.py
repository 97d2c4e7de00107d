"""Ranking and novelty: by hand, and against plain Python."""

from dataclasses import replace
from statistics import fmean, pstdev
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory import AtRandom, ByAge, ByScore, BySimilarity, ByValue, Policy
from empo2.memory.index import ColumnTable, cosine_similarities, unit
from empo2.memory.novelty import count_similar
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


def by_value(k=3, min_similarity=0.5, candidates=5, weight=0.5, exploration=0.0, seed=0) -> ByValue:
    return ByValue(k, min_similarity, candidates, weight, exploration, rng(seed))


def test_value_with_fixed_statistics_of_the_similarities():
    """Candidates of nearly equal similarity: their own deviation, 0.01, is not blown up to 1.

    z(Q) is -1, 1 for both; z(similarity) is 1, -1 over the candidates, and 0.1, -0.1 by a deviation of 0.1.
    """
    columns = entries([0.72, 0.70], values=[0.0, 1.0])
    assert by_value(weight=0.4)(columns).tolist() == [0, 1]  # 0.6 - 0.4 > 0.4 - 0.6
    fixed = replace(by_value(weight=0.4), statistics=(0.71, 0.1))
    assert fixed(columns).tolist() == [1, 0]  # 0.4 - 0.06 > 0.06 - 0.4
    assert replace(fixed, weight=0.05)(columns).tolist() == [0, 1]  # 0.095 - 0.05 > 0.05 - 0.095


def by_score(similarities, scores, texts, k=10, min_similarity=0.5, values=None):
    return ByScore(k, min_similarity)(entries(similarities, scores, values, texts)).tolist()


def test_score_orders_and_similarity_only_admits():
    assert by_score([0.6, 0.9, 0.4, 0.7], [3, 1, 9, 2], [0, 1, 2, 3]) == [0, 3, 1]


def test_the_newest_come_first_each_text_once():
    columns = entries([0.6, 0.9, 0.4, 0.7, 0.8, 0.7], [9, 9, 9, 1, 1, 1], texts=[0, 1, 2, 3, 1, 4])
    assert ByAge(10, 0.5)(columns).tolist() == [5, 4, 3, 0]
    assert ByAge(2, -1)(columns).tolist() == [5, 4]
    assert ByAge(3, 0.5)(entries([])).tolist() == []


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


def test_equal_scores_go_by_similarity_then_value_then_newest_first():
    assert by_score([0.6, 0.8, 0.8, 0.7], [1, 1, 1, 1], [0, 1, 2, 3]) == [2, 1, 3, 0]
    assert by_score([0.6, 0.8, 0.8, 0.7], [1, 1, 1, 1], [0, 1, 2, 3], values=[9, 2, 1, 5]) == [1, 2, 3, 0]
    assert by_score([0.8, 0.8, 0.8, 0.8], [1, 2, 2, 1], [0, 1, 2, 3], values=[9, 0, -1, 0]) == [1, 2, 0, 3]


def test_an_episode_answers_once_with_its_most_similar_entry():
    assert by_score([0.6, 0.9, 0.7, 0.8], [5, 5, 5, 1], [7, 7, 7, 8]) == [1, 3]


def test_equal_texts_answer_once_with_the_better_score():
    assert by_score([0.9, 0.6, 0.8], [1, 4, 2], [7, 7, 8]) == [1, 2]


def test_k_limits_after_equal_texts_have_been_dropped():
    assert by_score([0.9, 0.8, 0.7, 0.6], [3, 3, 2, 1], [7, 7, 8, 9], k=2) == [0, 2]


def test_a_text_with_very_many_of_the_best_entries_does_not_hide_the_others():
    n = 10_000
    scores, texts = np.full(n, 5.0), np.zeros(n)
    scores[[3, 4000]], texts[[3, 4000]] = (4.0, 3.0), (1, 2)
    found = ByScore(3, 0.5)(entries(np.full(n, 0.9), scores, texts=texts))
    assert found.tolist() == [n - 1, 3, 4000]


def test_similarity_orders_then_score_then_newest_first():
    rows = entries([0.7, 0.9, 0.7, 0.7, 0.5], [1, 0, 2, 2, 9])
    assert BySimilarity(10, 0.5)(rows).tolist() == [1, 3, 2, 0]
    assert BySimilarity(2, 0.5)(rows).tolist() == [1, 3]


def test_similarity_takes_the_nearest_entry_of_a_text_even_if_another_has_a_better_score():
    assert BySimilarity(10, 0.0)(entries([0.7, 0.9, 0.8], [9, 1, 1], texts=[4, 4, 5])).tolist() == [1, 2]


def test_value_weighs_z_scores_by_hand():
    # Similarities 0.6, 0.7, 0.8: z = -1.2247, 0, 1.2247. Values 4, 1, 1: z = 1.4142, -0.7071, -0.7071.
    rows = entries([0.6, 0.7, 0.8], values=[4, 1, 1])
    assert by_value()(rows).tolist() == [2, 0, 1]  # 0.2588, 0.0948, -0.3536
    assert by_value(weight=0.6)(rows).tolist() == [0, 2, 1]  # 0.3586, 0.0656, -0.4243
    assert by_value(weight=0.6, k=1)(rows).tolist() == [0]


def test_value_with_weight_0_is_similarity_and_with_weight_1_the_value():
    rows = entries([0.6, 0.9, 0.7, 0.8], values=[3, 1, 4, 1])
    assert by_value(k=4, weight=0.0)(rows).tolist() == [1, 3, 2, 0]
    assert by_value(k=4, weight=1.0)(rows).tolist() == [2, 0, 1, 3]


def test_value_chooses_among_the_most_similar_only():
    rows = entries([0.6, 0.9, 0.7, 0.8], values=[100, 1, 4, 1])
    assert by_value(candidates=3, weight=1.0)(rows).tolist() == [2, 1, 3]
    assert by_value(candidates=1, weight=1.0)(rows).tolist() == [1]


def test_candidates_of_one_text_count_once_by_the_nearest_and_newest_entry():
    rows = entries([0.9, 0.9, 0.8, 0.7, 0.6], values=[1, 1, 1, 2, 9], texts=[7, 7, 7, 8, 9])
    assert by_value(candidates=2, weight=1.0)(rows).tolist() == [3, 1]


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("equal", [0.1, 1 / 3, 1e300])
def test_equal_values_have_z_0_and_similarity_decides_then_age(weight, equal):
    rows = entries([0.6, 0.8, 0.8, 0.7, 0.8, 0.6, 0.6], values=[equal] * 7)
    assert by_value(k=7, candidates=7, weight=weight)(rows).tolist() == [4, 2, 1, 3, 6, 5, 0]


def test_equal_similarities_leave_it_to_the_value():
    assert by_value(weight=0.3)(entries([0.7] * 3, values=[1, 3, 2])).tolist() == [1, 2, 0]


def test_a_spread_too_small_to_be_squared_is_none():
    assert by_value(weight=1.0)(entries([0.7, 0.6], values=[0, 1e-200])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("policy", "admitted"), [(ByScore(5, 0.5), [1]), (BySimilarity(5, 0.5), [1]), (by_value(), [1, 0])]
)
def test_the_minimum_itself_is_enough_for_value_only(policy, admitted):
    assert policy(entries([0.5, 0.5000001, 0.4999999])).tolist() == admitted


@pytest.mark.parametrize("policy", [ByScore(3, 0.5), BySimilarity(3, 0.5), by_value(), by_value(exploration=1.0)])
def test_few_or_no_candidates_give_few_or_none(policy: Policy):
    assert policy(entries([])).tolist() == []
    assert policy(entries([0.1, -1.0])).tolist() == []
    assert policy(entries([0.1, 0.6, 0.9])).tolist() == [2, 1]


@pytest.mark.parametrize("policy", [ByScore(0, 0.5), BySimilarity(0, 0.5), by_value(k=0), by_value(candidates=0)])
def test_none_asked_for_none_given(policy: Policy):
    assert policy(entries([0.9, 0.8])).tolist() == []


def test_exploration_draws_from_the_candidates_each_once_and_ranks_what_it_drew():
    similarities = [0.95, 0.94, 0.93, 0.92, 0.91, 0.9, 0.3, 0.3]
    rows = entries(similarities, values=range(8), texts=[1, 1, 2, 3, 4, 5, 6, 7])
    explore = by_value(candidates=4, weight=1.0, exploration=1.0)
    drawn = [tuple(explore(rows).tolist()) for _ in range(200)]
    # The candidates by value: rows 4, 3, 2, 0. Every choice of three comes up, always best first.
    assert set(drawn) == {(4, 3, 2), (4, 3, 0), (4, 2, 0), (3, 2, 0)}
    again = replace(explore, generator=rng(0))
    assert drawn == [tuple(again(rows).tolist()) for _ in range(200)]


class Dice:
    """A generator that says the numbers it was given, and draws the last ones."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)

    def choice(self, n, size, replace):
        assert not replace
        return np.arange(n - size, n)[::-1]


def test_exploration_happens_where_the_draw_is_below_its_probability():
    policy = ByValue(1, 0.5, 5, 0.5, 0.25, cast(np.random.Generator, Dice(0.0, 0.2499, 0.25, 0.9)))
    rows = entries([0.6, 0.9, 0.7])
    assert [policy(rows).tolist() for _ in range(4)] == [[0], [0], [1], [1]]


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


def z_scores(values):
    spread = pstdev(values) if len(set(values)) > 1 else 0
    return [(value - fmean(values)) / spread if spread else 0 for value in values]


@given(ROWS, st.integers(0, 12), st.sampled_from(SIMILARITIES))
@settings(max_examples=200, deadline=None)
def test_ranking_equals_plain_python(rows, k, minimum):
    columns = entries(*([row[i] for row in rows] for i in range(4)))

    def similar(similarity):
        return similarity > minimum

    assert ByScore(k, minimum)(columns).tolist() == plain(rows, lambda row: (row[1], row[0], row[2]), k, similar)
    assert BySimilarity(k, minimum)(columns).tolist() == plain(rows, lambda row: (row[0], row[1]), k, similar)


@given(ROWS, st.integers(0, 5), st.sampled_from(SIMILARITIES), st.integers(0, 8), st.sampled_from([0.0, 0.37, 1.0]))
@settings(max_examples=200, deadline=None)
def test_ranking_by_value_equals_plain_python(rows, k, minimum, candidates, weight):
    columns = entries(*([row[i] for row in rows] for i in range(4)))
    chosen = plain(rows, lambda row: row[:1], candidates, lambda similarity: similarity >= minimum)
    ranks = zip(z_scores([rows[i][0] for i in chosen]), z_scores([rows[i][2] for i in chosen]), strict=True)
    ranked = sorted(
        ((round((1 - weight) * z + weight * q, 9), rows[i][0], i) for (z, q), i in zip(ranks, chosen, strict=True)),
        reverse=True,
    )
    found = by_value(k, minimum, candidates, weight)(columns)
    assert found.tolist() == [i for *_, i in ranked[:k]]


@pytest.mark.parametrize("best", [1, 30, 40, 5000])
def test_the_best_of_many_different_scores(best):
    """`best` equal ones on top of 5,000 different scores: about as many as are sorted, fewer and more."""
    scores = np.concatenate([rng(1).permutation(5000), np.full(best, 5000)])
    order = rng(2).permutation(len(scores))
    rows = [(0.9, float(scores[i]), 0.0, int(i)) for i in order]
    found = ByScore(2, 0.5)(entries(*([row[i] for row in rows] for i in range(4))))
    assert found.tolist() == plain(rows, lambda row: (row[1], row[0]), 2, lambda similarity: True)


def test_visits_of_all_similar_states_count():
    assert count_similar(np.array([], np.float32), np.array([], np.int64), threshold=0.5) == 0
    assert count_similar(np.array([0.5, 0.1]), np.array([4, 4]), threshold=0.5) == 0
    assert count_similar(np.array([0.6, 0.9, 0.2]), np.array([3, 5, 100]), threshold=0.5) == 8


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


@given(st.lists(st.tuples(st.sampled_from(["append", "drop_oldest", "drop"]), st.integers(0, 70)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_column_table_equals_a_list(operations):
    table = ColumnTable(id=np.empty(0, np.int64), tip=np.empty(0, np.int64), key=np.empty((0, 2), np.float32))
    expected, appended = [], 0
    for operation, number in operations:
        if operation == "append":
            new = list(range(appended, appended + number))
            table.append(number, id=new, tip=number, key=np.array([[i, -i] for i in new]).reshape(-1, 2))
            expected += [(i, number) for i in new]
            appended += number
        elif operation == "drop_oldest":
            count = min(number, len(expected))
            table.drop_oldest(count)
            del expected[:count]
        else:
            table.drop("tip", [number, number + 1, 1000])
            expected = [(i, tip) for i, tip in expected if tip not in (number, number + 1)]
        assert len(table) == len(expected)
        assert list(zip(table["id"].tolist(), table["tip"].tolist(), strict=True)) == expected
        assert table["key"].tolist() == [[i, -i] for i, _ in expected]
