"""Which stored entries answer a query: pure functions, arrays in, row indices out."""

import numpy as np


def best_by_score(
    similarities: np.ndarray, scores: np.ndarray, texts: np.ndarray, *, k: int, min_similarity: float
) -> np.ndarray:
    """EMPO²'s retrieval (arXiv 2602.23008): similar enough, then the best score first.

    Args:
        similarities: cosine of each entry's key with the query, [n], oldest entry first.
        scores: score of each entry's episode, [n].
        texts: a number per entry, [n], equal where the tip texts are equal. All entries of an episode share
            one tip, so "each text once" also means "each episode once".
        k: most rows to return.
        min_similarity: only entries with a cosine strictly above it count.

    Returns:
        At most `k` row indices, by score descending, then similarity descending, then newest first;
        of the rows of one text only the first in that order.
    """
    candidates = np.flatnonzero(similarities > min_similarity)
    order = candidates[np.lexsort((-candidates, -similarities[candidates], -scores[candidates]))]
    _, first_of_text = np.unique(texts[order], return_index=True)
    return order[np.sort(first_of_text)[:k]]
