"""Load the tasks, of a function, a file or a data set of the Hugging Face hub."""

import codecs
import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from empo2.recipe.config import TASK_FILES, Settings, imported, is_task_path
from empo2.recipe.errors import ConfigError
from empo2.recipe.protocol import MADE_UP, PANEL, TRAIN_PANEL, UNSEEN_PANEL, scope_of

_HUB = "hub:"
_CANARY = "canary"  # the field by which a data set, such as HLE, asks that nobody trains on it
_VARIABLE_BYTES = 130_000  # with its name, Linux takes 32 pages (MAX_ARG_STRLEN)
_EVERY = 10  # of a file without validation tasks, each tenth row is one

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Tasks:
    """Training and validation tasks: JSON-like rows, each the input of a rollout."""

    train: Rows
    val: Rows


def load_tasks(settings: Settings, *, made_up: bool = False) -> Tasks:
    """Return the tasks of ``tasks.source``; training tasks are repeated if they are too few for a step.

    A validation task may name its panel in the field ``panel``. With ``run.validate_training_tasks`` the training tasks
    are validation tasks of the panel ``train`` too, and others without a panel are ``unseen``.

    Args:
        made_up: accept the tasks that ``empo2 init`` has made up.

    Raises:
        ConfigError: there are no such tasks, they have no scope, they are made up, or not to be trained on.
    """
    tasks = settings.tasks
    if tasks.source is None:
        raise ConfigError("tasks.source=None: give the tasks, module:function, or --profile for ScienceWorld's")
    try:
        if tasks.source.startswith(_HUB) or is_task_path(tasks.source):
            train, val = read_tasks(tasks.source, **tasks.args)
        else:
            found = imported(tasks.source, "tasks.source")(**tasks.args)
            if len(found) != 2 or any(isinstance(rows, Mapping) for rows in found):
                raise ConfigError(f"tasks.source={tasks.source!r}: must return two lists, training and validation")
            train, val = found
    except (TypeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"tasks.args={tasks.args}: {error}") from None
    if not train or not val:
        raise ConfigError(f"tasks.source={tasks.source!r}: gave {len(train)} training and {len(val)} validation tasks")
    train, val = _checked(train, tasks.source), _checked(val, tasks.source)
    if any(row.get(_CANARY) for row in [*train, *val]):
        asked = f"tasks.source={tasks.source!r}: its tasks have a canary, which asks that nobody trains on them"
        raise ConfigError(f"{asked}; evaluate on them (docs/memrl-worlds.md)")
    if not made_up and any(row.get(MADE_UP) for row in [*train, *val]):
        made = f"tasks.source={tasks.source!r}: its tasks are made up by `empo2 init`"
        raise ConfigError(f"{made}; put your own there, or give tasks.source=FILE.jsonl")
    if settings.run.validate_training_tasks:
        val = [{PANEL: UNSEEN_PANEL, **row} for row in val] + [{**row, PANEL: TRAIN_PANEL} for row in train]
    for task in [*train, *(val if settings.run.validate_with_memory else ())]:
        scope_of(task, settings.memory.scope)
    # agent-lightning drops an incomplete batch.
    repeats = -(-settings.algorithm.tasks_per_step // len(train))
    return Tasks(train * repeats, val)


def read_tasks(
    source: str,
    *,
    validation: str | None = None,
    most_validation_tasks: int = 100,
    config: str | None = None,
    split: str = "train",
) -> tuple[Rows, Rows]:
    """Return training and validation tasks.

    Args:
        source: a file, a folder of tasks in Harbor's form, or ``hub:NAME``.
        validation: another file, or another split on the hub; without it, every tenth row is a validation task.
        most_validation_tasks: at most so many, from the beginning.
        config: configuration of the hub's data set, as ``main`` of gsm8k.
        split: of the hub's data set, for training.

    Raises:
        ConfigError: it cannot be read, or a row is not a JSON object.
        TypeError: an argument that there is not.
    """
    hub = source.startswith(_HUB)
    train = _of_hub(source, config, split) if hub else _of_file(source)
    if validation:
        val = _of_hub(source, config, validation) if hub else _of_file(validation, "tasks.args.validation")
    else:
        if len(train) < 2:
            raise ConfigError(f"tasks.source={source!r}: has {len(train)} rows; give two or more")
        val = train[::_EVERY][:most_validation_tasks]
        held_out = set(range(0, len(train), _EVERY)[: len(val)])
        train = [row for number, row in enumerate(train) if number not in held_out]
    return train, val[:most_validation_tasks]


def agent_variables(task: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``agent.env`` for a task, as agent-lightning's controller (1.0.2) sets them.

    Raises:
        ConfigError: the task has not the field of a variable, or the variable cannot hold it.
    """
    from agentlightning.controller.local_reconciler import _build_env_from_map

    try:
        variables = _build_env_from_map(task, dict(env))
    except ValueError as error:
        field = str(error).rpartition(" ")[2].removeprefix("input.")
        raise ConfigError(f"has no field {field!r}, which agent.env names; it has {sorted(task)}") from None
    for name, text in variables.items():
        if "\0" in text or len(os.fsencode(text)) > _VARIABLE_BYTES:
            limit = f"a variable holds at most {_VARIABLE_BYTES:,} bytes, none of them 0"
            fix = "give the agent a file, and its path in the task"
            raise ConfigError(f"agent.env.{name}={env[name]}, {len(text):,} characters: {limit}; {fix}")
    return variables


def _checked(rows: Sequence[Any], source: str) -> Rows:
    """Return rows as the inputs of rollouts, which travel as JSON."""
    checked = []
    for number, row in enumerate(rows):
        try:
            checked.append(dict(row))
            json.dumps(checked[-1], allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"tasks.source={source!r}: row {number} is not JSON-like: {error}") from None
    return checked


def _of_file(name: str, key: str = "tasks.source") -> Rows:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_table  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    file, source = Path(name).expanduser(), f"{key}={name!r}"
    if not is_task_path(name):
        raise ConfigError(f"{source}: give a {', '.join(TASK_FILES)} file")
    if not name.endswith(TASK_FILES):
        return _of_folder(file, source)
    try:
        if file.suffix == ".parquet":
            return read_table(file).to_pylist()
        read = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv}[file.suffix]
        return read(file, source)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror or error}") from None
    except ArrowInvalid as error:
        raise ConfigError(f"{source}: {str(error).splitlines()[0]}") from None


def _of_folder(folder: Path, source: str) -> Rows:
    from empo2.agents.coding.task_folders import read_folder

    if not folder.is_dir():
        raise ConfigError(f"{source}: there is no such folder")
    rows, left_out = read_folder(folder)
    if left_out:
        count = f"{len(left_out)} of {len(rows) + len(left_out)} tasks need a container"
        said = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        print(f"note   {source}: {count}: {said}", flush=True)
    return rows


def _json_lines(file: Path, source: str) -> Rows:
    rows = []
    for number, line in enumerate(file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{source}: line {number} is not an object with the task's fields")
        rows.append(row)
    return rows


def _json_list(file: Path, source: str) -> Rows:
    try:
        rows = json.loads(file.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{source}: must be a list of objects, the tasks; an object a line is a .jsonl file")
    return rows


def _csv(file: Path, source: str) -> Rows:
    """Return the rows under a line of field names; all values are texts."""
    csv.field_size_limit(2**31 - 1)
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)
        try:
            rows = [*reader]
        except (csv.Error, UnicodeError) as error:
            raise ConfigError(f"{source}: line {reader.reader.line_num} is not CSV in UTF-8: {error}") from None
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ConfigError(f"{source}: row {number} has not as many values as the first line has names")
    return rows


def _of_hub(source: str, config: str | None, split: str) -> Rows:
    from datasets import load_dataset

    try:
        return load_dataset(source.removeprefix(_HUB), config, split=split).to_list()  # pyright: ignore
    except Exception as error:  # of many packages: the network, the hub, the data set's files
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        fix = "without a network, give a file: FILE.jsonl or FILE.parquet"
        raise ConfigError(f"tasks.source={source!r}: cannot be loaded ({reason}); {fix}") from None
