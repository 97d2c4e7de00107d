"""Tasks of a world that a user has imported, in one file of JSON; the project's own tasks have the same form."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OWN = "own"

Task = Mapping[str, Any]


class TaskFileError(ValueError):
    """A file of tasks cannot be read; the message names it and the fix."""


def check_new(file: Path) -> None:
    """Raise FileExistsError for a file that is there, before an import works for minutes to write it."""
    if file.exists():
        raise FileExistsError(f"{file} exists already: remove it, or name another file with --output")


def write(file: Path, world: str, tasks: Mapping[str, Task]) -> None:
    """Write a world's tasks by name into a new file, which appears whole. Raises FileExistsError."""
    check_new(file)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps({"world": world, "tasks": tasks}))
    os.replace(part, file)


def path_of(world: str, name: str) -> Path:
    """Return the path of a file of tasks, or of the project's own. Raises TaskFileError if it is not there."""
    file = Path(__file__).parent / world / "own.json" if name == OWN else Path(name).expanduser()
    if not file.is_file():
        raise TaskFileError(f"there is no file {file} of tasks: {_remedy(world)}")
    return file


def read(world: str, name: str) -> dict[str, Task]:
    """Return the tasks of a file by their names. Raises TaskFileError."""
    file = path_of(world, name)
    try:
        content = json.loads(file.read_text())
        if content["world"] == world:
            return content["tasks"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise TaskFileError(f"{file} is no file of tasks of {world}: {_remedy(world)}")


def task_of(world: str, file: str, name: str) -> Task:
    """Return one task of a file. Raises TaskFileError."""
    if (task := read(world, file).get(name)) is None:
        raise TaskFileError(f"{file} has no task {name!r} of {world}")
    return task


def _remedy(world: str) -> str:
    return f"make it with `python -m empo2.agents.{world} import FILE`"
