"""The search index: BM25 with the original's constants (Lucene's formula, k1 0.9 and b 0.4), exact, in mapped files.

Every posting holds its final weight, so a search only adds weights. Rare terms come first: once the remaining terms
cannot bring a new product into the result, only the current candidates are looked up (MaxScore, Turtle and Flood,
1995).
"""

import sqlite3
from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

import numpy as np

from .words import segments, term, terms

HITS = 50  # of a search, as in the original
K1, B = 0.9, 0.4  # pyserini's defaults, which the original does not change
ROUNDING = 1e-6  # relative margin of the bounds, so that float32 rounding loses no hit
_TABLE = """
CREATE TABLE terms (term TEXT PRIMARY KEY, start INTEGER, stop INTEGER, best REAL, floor REAL) WITHOUT ROWID;
"""
_PLACES, _WEIGHTS = "places.npy", "weights.npy"
_AT_ONCE = 1 << 22  # postings weighted at once
_LOOKUP = 8  # looking up one product in a list of postings takes as long as adding this many of them


class _Postings(NamedTuple):
    """The weights that one term of a query adds to products.

    places, weights: of the products that have the term, by place, with the weight of one occurrence in the query.
    times: occurrences in the query.
    best: the most that it adds to a product.
    floor: what it adds to each of `HITS` products at least; 0 where fewer have the term.
    """

    places: np.ndarray
    weights: np.ndarray
    times: int
    best: float
    floor: float


class SearchIndex:
    """An index written by `write_index`; its lists are mapped into memory, its terms are read from `db`."""

    def __init__(self, db: sqlite3.Connection, folder: Path, products: int) -> None:
        self._db, self._products = db, products
        self._places, self._weights = (
            np.asarray(np.load(folder / name, mmap_mode="r")) for name in (_PLACES, _WEIGHTS)
        )

    def search(self, words: str) -> list[int]:
        """Return the places of at most `HITS` products, best first, ties by place; none without a known term."""
        lists = self._lists(words)
        left = [*accumulate((each.best for each in reversed(lists)), initial=0.0)][::-1]
        floor = max((each.floor for each in lists), default=0.0)
        scores = np.zeros(self._products)
        racing = None  # the products that can still be hits, once no others can
        for each, before, after in zip(lists, left, left[1:], strict=False):
            if racing is None and before * (1 + ROUNDING) < floor:
                racing = np.flatnonzero(scores >= _lower(floor - before))
            if racing is None or len(racing) * _LOOKUP > len(each.places):
                scores[each.places] += each.weights * np.float32(each.times)
            else:
                at = np.minimum(np.searchsorted(each.places, racing), len(each.places) - 1)
                found = each.places[at] == racing
                scores[racing[found]] += each.weights[at[found]] * np.float32(each.times)
            reached = scores[each.places if racing is None else racing]
            floor = max(floor, _nth_best(reached[reached > floor]))
            if racing is not None:
                racing = racing[scores[racing] >= _lower(floor - after)]
        if racing is None:
            racing = np.flatnonzero(scores >= _lower(floor)) if floor else np.flatnonzero(scores)
        best = np.argsort(-scores[racing].astype(np.float32), kind="stable")[:HITS]
        return racing[best].tolist()

    def _lists(self, words: str) -> list[_Postings]:
        """Return the postings of the terms that the index has, those that can add most first."""
        query = "SELECT start, stop, best, floor FROM terms WHERE term = ?"
        lists = []
        for name, times in Counter(terms(words)).items():
            if row := self._db.execute(query, (name,)).fetchone():
                start, stop, best, floor = row
                places, weights = self._places[start:stop], self._weights[start:stop]
                lists.append(_Postings(places, weights, times, times * best, times * floor))
        return sorted(lists, key=lambda each: -each.best)


def write_index(db: sqlite3.Connection, folder: Path, texts: Iterable[str]) -> int:
    """Write the index of the products' texts into an existing folder, its terms into `db`; return the number of texts.

    While texts are read, RAM holds only their distinct words; afterwards some 20 bytes per posting.
    """
    with TemporaryDirectory(dir=folder) as scratch:
        ids_file, counts_file = Path(scratch, "ids"), Path(scratch, "counts")
        with ids_file.open("wb") as ids, counts_file.open("wb") as counts:
            numbers, starts, lengths = _count(texts, ids, counts)
        db.executescript(_TABLE)
        if not numbers:
            _save(folder, np.empty(0), np.empty(0))
            return len(lengths)
        from scipy.sparse import csr_array  # takes 0.2 s, and an agent does not need it

        ids, counts = np.fromfile(ids_file, np.int32), np.fromfile(counts_file, np.int32)
        starts = np.array(starts, np.int32 if len(ids) < 1 << 31 else np.int64)
        by_term = csr_array((counts, ids, starts), (len(lengths), len(numbers))).tocsc()
        del ids, counts
    starts = by_term.indptr
    weights = _weights(by_term.indices, by_term.data, starts, np.array(lengths))
    _save(folder, by_term.indices, weights)
    rows = (
        (name, start, stop, float(weights[start:stop].max()), _nth_best(weights[start:stop]))
        for name, number in sorted(numbers.items())
        for start, stop in [starts[number : number + 2].tolist()]
    )
    db.executemany("INSERT INTO terms VALUES (?, ?, ?, ?, ?)", rows)
    return len(lengths)


def _count(texts: Iterable[str], ids: BinaryIO, counts: BinaryIO) -> tuple[dict[str, int], array[int], array[int]]:
    """Write the number of each text's terms and how often each stands there, int32, text after text.

    Return the number of each term, where each text's terms begin and the last one's end, and the texts' lengths.
    """
    numbers: dict[str, int] = {}
    by_segment: dict[str, int | None] = {}  # None for a segment that is no term
    starts, lengths = array("q", [0]), array("i")
    for text in texts:
        found: Counter[int] = Counter()
        for segment, times in Counter(segments(text)).items():
            if segment not in by_segment:
                name = term(segment)
                by_segment[segment] = None if name is None else numbers.setdefault(name, len(numbers))
            if (number := by_segment[segment]) is not None:
                found[number] += times
        array("i", found.keys()).tofile(ids)
        array("i", found.values()).tofile(counts)
        starts.append(starts[-1] + len(found))
        lengths.append(found.total())
    return numbers, starts, lengths


def _save(folder: Path, places: np.ndarray, weights: np.ndarray) -> None:
    np.save(folder / _PLACES, places.astype(np.int32, copy=False))
    np.save(folder / _WEIGHTS, weights.astype(np.float32, copy=False))


def stored_length(length: int) -> int:
    """Return a text's number of terms as Lucene's one byte stores it: from 40 on, four binary digits above 24."""
    beyond = length - 24
    dropped = max(0, beyond.bit_length() - 4) if beyond > 0 else 0
    return 24 + (beyond >> dropped << dropped) if dropped else length


def _weights(places: np.ndarray, counts: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return each posting's BM25 weight, float32, as Lucene's BM25Similarity gives it.

    `places` and `counts` are the postings, those of term t from `starts[t]` to `starts[t + 1]`; `lengths` are the
    products' numbers of terms. The mean length is exact; a product's own length is rounded as in one byte. Products
    without a term do not count.
    """
    known = np.array([stored_length(length) for length in range(int(lengths.max()) + 1)], np.float32)
    saturation = np.float32(K1) * (1 - B + B * known[lengths] / lengths[lengths > 0].mean()).astype(np.float32)
    with_term = np.diff(starts)
    rarity = np.log1p(((lengths > 0).sum() - with_term + 0.5) / (with_term + 0.5))
    weights = np.repeat(rarity.astype(np.float32), with_term)
    for first in range(0, len(weights), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        weights[part] *= counts[part] / (counts[part] + saturation[places[part]])
    return weights


def _nth_best(values: np.ndarray) -> float:
    """Return the `HITS`th largest value, 0 where there are fewer."""
    return float(np.partition(values, -HITS)[-HITS]) if len(values) >= HITS else 0.0


def _lower(bound: float) -> float:
    return bound - ROUNDING * abs(bound)
