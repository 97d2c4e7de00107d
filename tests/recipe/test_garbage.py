"""Objects in cycles go at a step's end, not within it, unless the process has grown too much."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from empo2.recipe.gateway import garbage


@pytest.fixture
def between_steps() -> Iterator[None]:
    thresholds = gc.get_threshold()
    garbage.collect_between_steps()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Link:
    other: "Link"


def old_cycle() -> weakref.ref[Link]:
    """A cycle that outlived a look at young objects, and is garbage."""
    link = Link()
    link.other = link
    gc.collect(0)
    return weakref.ref(link)


def test_what_is_old_is_looked_at_when_the_step_ends(between_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, cycle = [[number] for number in range(100)], old_cycle()
    kept += [[[number]] for number in range(400_000)]  # ten looks at young ones
    garbage.collect_if_grown()
    assert cycle() is not None
    garbage.collect()
    assert cycle() is None
    cycle = old_cycle()
    monkeypatch.setattr(garbage, "_GROWTH", -(2**40))
    garbage.collect_if_grown()
    assert cycle() is None and len(kept) == 400_100


def test_others_leave_it_to_python() -> None:
    cycle = old_cycle()
    garbage.collect()
    assert cycle() is not None
