"""The search index against BM25 by hand and against a plain loop over all texts."""

import math
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from empo2.agents.webshop.search import HITS, SearchIndex, stored_length, write_index
from empo2.agents.webshop.words import terms


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Callable[[list[str]], SearchIndex]]:
    with closing(sqlite3.connect(":memory:")) as db:

        def make(texts: list[str]) -> SearchIndex:
            return SearchIndex(db, tmp_path, write_index(db, tmp_path, texts))

        yield make


def test_a_length_keeps_what_fits_into_lucenes_byte():
    stored = {0: 0, 23: 23, 24: 24, 40: 40, 41: 40, 55: 54, 56: 56, 87: 84, 88: 88, 95: 88, 96: 96, 167: 152, 1047: 984}
    assert {length: stored_length(length) for length in stored} == stored


def test_weights_by_hand(index):
    """Four texts of 2, 1, 3 and 0 words: three count, their mean length is 2.

    red: in one of three, ln(1 + 2.5 / 1.5) = 0.980829, twice in a text of 3 words, whose saturation constant is
    0.9 * (0.6 + 0.4 * 1.5) = 1.08: 0.980829 * 2 / 3.08 = 0.636902.
    mug: in all three, ln(1 + 0.5 / 3.5) = 0.133531; constants 0.9, 0.9 * (0.6 + 0.2) = 0.72 and 1.08.
    """
    made = index(["blue mug", "mug", "red red mug", "the"])
    (red_places, red), (mug_places, mug) = made._postings("red"), made._postings("mug")
    assert (red_places.tolist(), mug_places.tolist()) == ([2], [0, 1, 2])
    assert red.tolist() == pytest.approx([0.636902], abs=1e-6)
    assert mug.tolist() == pytest.approx([0.133531 / 1.9, 0.133531 / 1.72, 0.133531 / 2.08], abs=1e-6)
    assert made.search("mug") == [1, 0, 2]
    assert made.search("red mug mug") == [2, 1, 0]
    assert made.search("the green") == []


def plain_scores(counts: list[Counter[str]], words: str) -> dict[int, float]:
    """BM25 by loops: Lucene's formula, lengths as its byte keeps them."""
    known = [each for each in counts if each]
    mean = sum(each.total() for each in known) / len(known)
    scores: dict[int, float] = {}
    for name, times in Counter(terms(words)).items():
        having = sum(name in each for each in counts)
        for place, each in enumerate(counts):
            if tf := each[name]:
                rarity = math.log(1 + (len(known) - having + 0.5) / (having + 0.5))
                length = 0.9 * (1 - 0.4 + 0.4 * stored_length(each.total()) / mean)
                scores[place] = scores.get(place, 0) + times * rarity * tf / (tf + length)
    return scores


def test_what_is_found_is_best_among_all(index):
    """800 texts of words that are common and rare as in a language, and queries of 1 to 12 of them."""
    generator = random.Random(0)
    vocabulary = [f"w{number}" for number in range(400)]
    shares = [1 / (number + 1) for number in range(400)]
    texts = [" ".join(generator.choices(vocabulary, shares, k=generator.randint(0, 90))) for _ in range(800)]
    made = index(texts)
    counts = [Counter(terms(text)) for text in texts]
    for _ in range(150):
        words = " ".join(generator.choices(vocabulary, shares, k=generator.randint(1, 12)))
        scores = plain_scores(counts, words)
        found = made.search(words)
        best = sorted(scores.values(), reverse=True)[:HITS]
        assert len({*found}) == len(found) == len(best)
        assert [scores[place] for place in found] == pytest.approx(best, rel=1e-5)


def test_equal_scores_come_by_place_also_where_only_some_of_them_are_hits(index):
    texts = ["plain mug", "blue mug", "plain cup"] * 60
    blue = list(range(1, 180, 3))
    made = index(texts)
    assert made.search("blue") == blue[:HITS]
    assert made.search("blue mug") == blue[:HITS]
    assert made.search("mug") == [place for place in range(180) if place % 3 != 2][:HITS]


def test_without_words_nothing_is_found(index):
    assert index(["", "the", "!"]).search("the mug !") == []
