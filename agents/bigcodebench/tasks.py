"""The task rows, each of which asks for one function; and how official files are read."""

import ast
import gzip
import json
import os
import queue
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..sandbox import Sandbox
from ..task_file import OWN, Task, path_of, read
from ..text_game.episode import ChatEpisode, one_of, positive

WORLD = "bigcodebench"
SECONDS = 240  # of a task's tests, as in BigCodeBench
SPLITS = Path(__file__).with_name("splits.json")  # MemRL's: Hard's tasks, and those held out of it and of all

Split = Literal["full", "hard"]


@dataclass(frozen=True, kw_only=True)
class Episode(ChatEpisode):
    """An episode of BigCodeBench, a single reply. Raises ValueError if the file of tasks is not there."""

    variables = "BIGCODEBENCH"

    tasks: str  # the file that `python -m empo2.agents.bigcodebench import` has made, or "own"
    task: str  # its number

    def __post_init__(self) -> None:
        path_of(WORLD, self.tasks)


def load(
    split: Split = "full", tasks: str = OWN, train_tasks: int | None = None, test_tasks: int | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and validation rows: one of MemRL's splits of the tasks of a file, by their numbers.

    Args:
        split: of all tasks, or of BigCodeBench-Hard's.
        train_tasks: so many of the first; None for all.
        test_tasks: likewise.

    Raises ValueError for a wrong argument, and for a file that holds no tasks.
    """
    one_of(get_args(Split), "split", split)
    names, splits = sorted(read(WORLD, tasks), key=lambda name: (len(name), name)), json.loads(SPLITS.read_text())
    if split == "hard":
        hard = {*splits["hard"]}
        names = [name for name in names if name in hard]
    held_out = {*splits[f"{split}_held_out"]}
    file = tasks if tasks == OWN else str(path_of(WORLD, tasks).absolute())

    def rows(key: str, count: int | None, chosen: list[str]) -> list[dict[str, Any]]:
        if count is not None:
            positive(key, count)
        return [asdict(Episode(tasks=file, task=name)) for name in chosen[:count]]

    train = rows("train_tasks", train_tasks, [name for name in names if name not in held_out])
    return train, rows("test_tasks", test_tasks, [name for name in names if name in held_out])


def program(task: Task, code: str) -> str:
    """Return the program that tests a reply's code, which may leave out the imports that the task gives."""
    return f"{task['start']}    pass\n\n{code}\n\n{task['test']}"


def read_official(file: Path, python: str) -> Iterator[tuple[str, Task | None, list[str]]]:
    """Yield the tasks of an official file by number: None, with the failures, where their own solutions fail here.

    Args:
        python: runs the programs.

    Raises ValueError, naming the file, if it is none of theirs.
    """
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt") as lines:
            tasks = [converted(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise ValueError(f"{file} is no file of BigCodeBench's tasks ({error!r})") from error
    modules = sorted({module for _, task in tasks for module in task["modules"]})
    workers, free = os.cpu_count() or 1, queue.SimpleQueue[Sandbox]()

    def failures(task: Task) -> list[str]:
        sandbox = free.get()
        try:
            tests, failed = sandbox.test(program(task, task["solution"]), SECONDS)
        finally:
            free.put(sandbox)
        return failed if tests or failed else ["has no tests"]

    with ExitStack() as stack, ThreadPoolExecutor(workers) as pool:
        for _ in range(workers):
            free.put(stack.enter_context(Sandbox("python", modules, python)))
        for (name, task), failed in zip(tasks, pool.map(failures, (task for _, task in tasks)), strict=True):
            yield name, None if failed else task, failed


def converted(row: Mapping[str, Any]) -> tuple[str, Task]:
    """Return an official task's number and what an episode needs of it."""
    start, solution = row["code_prompt"], row["code_prompt"] + row["canonical_solution"]
    task = {"instruction": row["instruct_prompt"], "start": start, "solution": solution, "test": row["test"]}
    modules = sorted(third_party(f"{solution}\n{row['test']}"))
    return row["task_id"].removeprefix("BigCodeBench/"), {**task, "modules": modules}


def third_party(source: str) -> set[str]:
    """Return the modules outside of the standard library that a program imports."""
    names = set[str]()
    with warnings.catch_warnings(action="ignore"):  # of escapes in strings
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
