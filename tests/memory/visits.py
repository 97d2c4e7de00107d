"""A visit as one episode makes it: counted, and committed at once."""

from empo2.memory import MemoryStore, Visit


def visit(store: MemoryStore, scope: str, state: str, key, *, threshold: float) -> int:
    """Return n, the number of similar visits with this one."""
    count = store.states.count(scope, key, threshold=threshold) + 1
    store.states.add_visits([Visit(scope, state, key)], threshold=threshold)
    return count
