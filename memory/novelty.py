"""How often the agents have been near a state: the count n of the intrinsic reward r = 1/n."""

import numpy as np


def count_visit(similarities: np.ndarray, visits: np.ndarray, *, threshold: float) -> tuple[int | None, int]:
    """Whether a state is new, and how many visits its neighbourhood has had, this one included.

    The paper (arXiv 2602.23008) calls n "the number of similar past states" and stores a state only if it is
    similar to none. Read literally, n would stay 1 on every return to the same state; so each stored state
    stands for all the visits near it, and n is their sum: 1, 2, 3, ... for a state visited again and again.

    Args:
        similarities: cosine of each stored state with the visited one, [n].
        visits: visits counted so far for each stored state, [n].
        threshold: a state is similar if its cosine is strictly above this.

    Returns:
        (row, count): the most similar stored state, whose visits the caller raises by one, or None if the
        visited state is new; and the count n >= 1.
    """
    similar = similarities > threshold
    if not similar.any():
        return None, 1
    return int(similarities.argmax()), int(visits[similar].sum()) + 1
