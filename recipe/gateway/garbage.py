"""Python's garbage collector, which looks for objects in cycles only where nobody waits for it.

With the calls of a step held, a full pass stops the event loop for half a second. Nearly all that a call leaves is
freed without one, when the trainer deletes the rollout.
"""

import gc

import psutil

_YOUNG = 5_000  # objects made between two looks at these alone, each of which takes some milliseconds
_NEVER = 2**31 - 1
_GROWTH = 4 * 2**30  # bytes of the process after which it looks at all of them, even within a step

_seen = 0  # bytes of the process when it last did


def collect_between_steps() -> None:
    """From now on look at young objects alone; what is there now lives on and is never looked at."""
    gc.freeze()
    gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    collect()


def collect() -> None:
    """Look at all objects, if `collect_between_steps` left that to the caller."""
    global _seen
    if gc.get_threshold()[0] == _YOUNG:
        gc.collect()
        _seen = psutil.Process().memory_info().rss


def collect_if_grown() -> None:
    """`collect` if the process has grown since the last time: it may serve agents that nobody trains."""
    if psutil.Process().memory_info().rss > _seen + _GROWTH:
        collect()
