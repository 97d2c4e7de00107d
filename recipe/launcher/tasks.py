"""The tasks and the agent that the settings name."""

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.protocol import scope_of


@dataclass(frozen=True)
class Tasks:
    """Training and validation tasks: JSON-like rows, each of which becomes a rollout's input."""

    train: list[dict[str, Any]]
    val: list[dict[str, Any]]


def check_agent(settings: Settings) -> str | None:
    """Import the agent's class, here and not in each rollout's log; what its ``check()`` says, if it has one.

    Raises:
        ConfigError: the class cannot be had, or what it needs is missing.
    """
    name = settings.agent.class_
    loaded = _load(name, "agent.class")
    if not hasattr(loaded, "run"):
        raise ConfigError(
            f"agent.class={name!r}: has no run() method; agent-lightning calls {name.split(':')[1]}().run()"
        )
    try:
        return loaded.check() if hasattr(loaded, "check") else None
    except Exception as error:
        raise ConfigError(f"agent.class={name!r}: {error}") from None


def load_tasks(settings: Settings) -> Tasks:
    """The tasks that ``tasks.source`` names.

    Raises:
        ConfigError: the function cannot be had, refuses its arguments, gives no tasks, or tasks without a scope.
    """
    tasks = settings.tasks
    try:
        train, val = _load(tasks.source, "tasks.source")(**tasks.args)
    except (TypeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"tasks.args={tasks.args}: {error}") from None
    if not train or not val:
        raise ConfigError(f"tasks.source={tasks.source!r}: gave {len(train)} training and {len(val)} validation tasks")
    for task in train:
        scope_of(task, settings.memory.scope)
    # agent-lightning drops an incomplete batch: few tasks are repeated until they fill one.
    repeats = -(-settings.algorithm.tasks_per_step // len(train))
    return Tasks([dict(row) for row in train] * repeats, [dict(row) for row in val])


def _load(name: str, key: str) -> Any:
    module, attribute = name.split(":")
    sys.path[:0] = [os.getcwd()] if os.getcwd() not in sys.path else []
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(f"{key}={name!r}: cannot be imported: {error}") from None
