"""The tasks that a run trains and validates on."""

import sys
from types import ModuleType
from typing import Any

import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher.tasks import Tasks, load_tasks

TRAIN = [{"task": "a", "variation": 0}, {"task": "a", "variation": 1}]
VAL: list[dict[str, Any]] = [{"task": "a", "variation": 7}, {"task": "b", "variation": 0, "panel": "far"}]

SETTINGS = ["tasks.source=made_tasks:load", "memory.scope=[task, variation]", "algorithm.tasks_per_step=3"]


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("made_tasks")
    module.load = lambda: (TRAIN, VAL)
    monkeypatch.setitem(sys.modules, "made_tasks", module)


def loaded(*options: str) -> Tasks:
    return load_tasks(load_settings("cpu", [*SETTINGS, *options]))


def test_rows_are_passed_on_as_they_are() -> None:
    assert loaded() == Tasks(TRAIN * 2, VAL)


def test_validation_on_training_tasks_too() -> None:
    """Each once, though a step needs more; a panel that a row names stays."""
    tasks = loaded("run.validate_training_tasks=true")
    assert tasks.train == TRAIN * 2
    assert tasks.val == [
        {"task": "a", "variation": 7, "panel": "unseen"},
        {"task": "b", "variation": 0, "panel": "far"},
        {"task": "a", "variation": 0, "panel": "train"},
        {"task": "a", "variation": 1, "panel": "train"},
    ]


def test_validation_tasks_with_memory_need_a_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["made_tasks"], "load", lambda: (TRAIN, [{"task": "a"}]))
    assert loaded().val == [{"task": "a"}]
    with pytest.raises(ConfigError, match=r"memory\.scope.*no field 'variation'"):
        loaded("run.validate_with_memory=true")
