"""The search index: BM25 with the original's constants (Lucene's formula, k1 0.9 and b 0.4), exact, in mapped files.

Every posting holds its final weight, so a search only adds weights.
"""

import sqlite3
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np

from .words import segments, term, terms

HITS = 50  # of a search, as in the original
K1, B = 0.9, 0.4  # pyserini's defaults, which the original does not change
_TABLE = """
CREATE TABLE terms (term TEXT PRIMARY KEY, start INTEGER, stop INTEGER) WITHOUT ROWID;
"""
_PLACES, _WEIGHTS = "places.npy", "weights.npy"
_AT_ONCE = 1 << 22  # postings weighted at once


class SearchIndex:
    """An index written by `write_index`; its lists are mapped into memory, its terms are read from `db`."""

    def __init__(self, db: sqlite3.Connection, folder: Path, products: int) -> None:
        self._db, self._products = db, products
        self._places, self._weights = (
            np.asarray(np.load(folder / name, mmap_mode="r")) for name in (_PLACES, _WEIGHTS)
        )

    def search(self, words: str) -> list[int]:
        """Return the places of at most `HITS` products, best first, ties by place; none without a known term."""
        sums = np.zeros(self._products)
        for name, times in Counter(terms(words)).items():
            places, weights = self._postings(name)
            sums[places] += weights * np.float32(times)
        scores = sums.astype(np.float32)
        found = np.flatnonzero(scores)
        if len(found) > HITS:
            found = found[scores[found] >= np.partition(scores[found], -HITS)[-HITS]]
        return found[np.argsort(-scores[found], kind="stable")[:HITS]].tolist()

    def _postings(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the products that have a term, and the weight of one occurrence of it in the query."""
        row = self._db.execute("SELECT start, stop FROM terms WHERE term = ?", (name,)).fetchone()
        start, stop = row or (0, 0)
        return self._places[start:stop], self._weights[start:stop]


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
    rows = ((name, *starts[number : number + 2].tolist()) for name, number in sorted(numbers.items()))
    db.executemany("INSERT INTO terms VALUES (?, ?, ?)", rows)
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
