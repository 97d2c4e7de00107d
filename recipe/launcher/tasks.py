"""Load the tasks and check the agent that the settings name."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from empo2.recipe.config import Settings, imported
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher.task_files import is_data, read_tasks
from empo2.recipe.protocol import MADE_UP, PANEL, TRAIN_PANEL, UNSEEN_PANEL, scope_of


@dataclass(frozen=True)
class Tasks:
    """Training and validation tasks: JSON-like rows, each the input of a rollout."""

    train: list[dict[str, Any]]
    val: list[dict[str, Any]]


def check_agent(settings: Settings) -> str | None:
    """Import the agent's class, so that an error shows here instead of in each rollout's log.

    Returns:
        The line that the class's ``check()`` returns; None if it has no ``check()`` or returns none.

    Raises:
        ConfigError: there is none, it cannot be imported, has no ``run()``, or its ``check()`` fails.
    """
    name = settings.agent.name
    loaded = imported(name, "agent.class")
    if not hasattr(loaded, "run"):
        raise ConfigError(
            f"agent.class={name!r}: has no run() method; agent-lightning calls {name.split(':')[1]}().run()"
        )
    try:
        return loaded.check() if hasattr(loaded, "check") else None
    except Exception as error:
        raise ConfigError(f"agent.class={name!r}: {error}") from None


@contextlib.contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """Drop the traceback that py4j logs when Ctrl-C interrupts a call of a world in Java."""

    def other(record: logging.LogRecord) -> bool:
        return "KeyboardInterrupt" not in record.getMessage()

    root = logging.getLogger()
    root.addFilter(other)
    try:
        yield
    finally:
        root.removeFilter(other)


def load_tasks(settings: Settings, *, made_up: bool = False) -> Tasks:
    """Return the tasks of ``tasks.source``; training tasks are repeated if they are too few for a step.

    A validation task may name its panel in the field ``panel``. With ``run.validate_training_tasks`` the training tasks
    are validation tasks of the panel ``train`` too, and others without a panel are ``unseen``.

    Args:
        made_up: accept the tasks that ``empo2 init`` has made up.

    Raises:
        ConfigError: the function cannot be imported, refuses its arguments, or gives no tasks, tasks without a scope,
            or tasks that are made up.
    """
    tasks = settings.tasks
    if tasks.source is None:
        raise ConfigError("tasks.source=None: give the tasks, module:function, or --profile for ScienceWorld's")
    try:
        if is_data(tasks.source):
            train, val = read_tasks(tasks.source, **tasks.args)
        else:
            with _quiet_interrupts():
                train, val = imported(tasks.source, "tasks.source")(**tasks.args)
    except (TypeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"tasks.args={tasks.args}: {error}") from None
    if not train or not val:
        raise ConfigError(f"tasks.source={tasks.source!r}: gave {len(train)} training and {len(val)} validation tasks")
    train, val = [dict(row) for row in train], [dict(row) for row in val]
    if not made_up and any(row.get(MADE_UP) for row in [*train, *val]):
        raise ConfigError(
            f"tasks.source={tasks.source!r}: its tasks are made up by `empo2 init`; put your own there, or give "
            "tasks.source=FILE.jsonl"
        )
    if settings.run.validate_training_tasks:
        val = [{PANEL: UNSEEN_PANEL, **row} for row in val] + [{**row, PANEL: TRAIN_PANEL} for row in train]
    for task in [*train, *(val if settings.run.validate_with_memory else ())]:
        scope_of(task, settings.memory.scope)
    # agent-lightning drops an incomplete batch.
    repeats = -(-settings.algorithm.tasks_per_step // len(train))
    return Tasks(train * repeats, val)


def check_rows(settings: Settings, panel: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows that the agent's variables, the scope or, for the text games of this package, the world do not fit.

    Args:
        panel: name of the rows' panel, for the message.

    Raises:
        ConfigError: names the first row that is refused, and why.
    """
    agent = settings.agent
    episode = getattr(imported(agent.name, "agent.class"), "episode", None)
    fields = {value.removeprefix("input.").partition(".")[0] for value in agent.env.values() if value[:6] == "input."}
    for number, row in enumerate(rows):
        where = f"--panel {panel}, row {number}"
        if missing := sorted(fields - set(row)):
            raise ConfigError(f"{where}: has no field {missing[0]!r}, which agent.env names; it has {sorted(row)}")
        scope_of(row, settings.memory.scope)
        if episode is not None:
            try:
                episode(**row)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{where}: {error}") from None
