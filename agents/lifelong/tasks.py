"""The task rows, each of which defines one episode; and how official files are read."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..sandbox import Sandbox
from ..task_file import OWN, Task, path_of, read
from ..text_game.episode import ChatEpisode, one_of, positive
from .tables import StatementError, equal_rows, fingerprints, open_table

WORLD = "lifelong"
MAX_STEPS = 15  # as in MemRL
HELD_OUT = Path(__file__).with_name("held_out.json")  # MemRL's validation tasks, and two of our own

Kind = Literal["db", "os"]
_AT_ONCE = 8  # machines, whose scripts sleep more than they compute


@dataclass(frozen=True, kw_only=True)
class Episode(ChatEpisode):
    """An episode of LifelongAgentBench. Raises ValueError when a field is wrong, or the file of tasks is not there."""

    variables = "LIFELONG"

    tasks: str  # the file that `python -m empo2.agents.lifelong import` has made, or "own"
    kind: str  # db | os
    task: str  # its number in the official file
    max_steps: int  # replies

    def __post_init__(self) -> None:
        path_of(WORLD, self.tasks)
        one_of(get_args(Kind), "kind", self.kind)
        positive("max_steps", self.max_steps)

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.task}"


def load(
    kind: Kind = "db",
    tasks: str = OWN,
    max_steps: int = MAX_STEPS,
    train_tasks: int | None = None,
    test_tasks: int | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and validation rows: MemRL's split of the tasks of a file, by their numbers.

    Args:
        train_tasks: so many of the first; None for all.
        test_tasks: likewise.

    Raises ValueError for a wrong argument, and for a file that holds no tasks.
    """
    Episode(tasks=tasks, kind=kind, task="", max_steps=max_steps)  # checks every argument before the file is read
    held_out = set(json.loads(HELD_OUT.read_text())[kind])
    names = [name.removeprefix(f"{kind}/") for name in read(WORLD, tasks) if name.startswith(f"{kind}/")]
    names.sort(key=lambda name: (len(name), name))
    file = tasks if tasks == OWN else str(path_of(WORLD, tasks).absolute())

    def rows(key: str, count: int | None, chosen: list[str]) -> list[dict[str, Any]]:
        if count is not None:
            positive(key, count)
        return [asdict(Episode(tasks=file, kind=kind, task=name, max_steps=max_steps)) for name in chosen[:count]]

    train = rows("train_tasks", train_tasks, [name for name in names if name not in held_out])
    return train, rows("test_tasks", test_tasks, [name for name in names if name in held_out])


def read_official(file: Path, server: str | None) -> Iterator[tuple[str, Task | None]]:
    """Yield the tasks of an official file by name: None for one whose own solution does not solve it here.

    Args:
        server: as in `open_table`, for tasks on tables.

    Raises ValueError, naming the file, if it is none of theirs.
    """
    try:
        tasks = json.loads(file.read_text())
        kinds = {"os" if "evaluation_info" in task else "db" for task in tasks.values()}
        (kind,) = kinds
        convert: Callable[[Mapping[str, Any]], Task | None] = (
            of_machine if kind == "os" else lambda task: of_table(task, server)
        )
        with ThreadPoolExecutor(_AT_ONCE if kind == "os" else 1) as pool:
            for number, task in zip(tasks, pool.map(convert, tasks.values()), strict=True):
                yield f"{kind}/{number}", task
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no file of LifelongAgentBench's db or os tasks ({error!r})") from error


def of_table(task: Mapping[str, Any], server: str | None = None) -> Task | None:
    """Read an official task on a table; None if its statement has another result here.

    Order counts where the statement has ORDER BY; rows that it leaves in any order may stand as they do here.
    """
    right, info = task["answer_info"], task["table_info"]
    table = open_table(info, server)
    try:
        found = [list(row) for row in table.execute(right["sql"])]
        prints = fingerprints(table.rows())
    except StatementError:
        return None
    finally:
        table.close()
    ordered = "ORDER BY" in right["sql"].upper()
    answers: list[Any] = []
    if right["md5"] is None:
        if not equal_rows(found, right["direct"], ordered=False):
            return None
        own = ordered and not equal_rows(found, right["direct"], ordered=True)
        answers = [right["direct"], *([found] if own else [])]
    elif right["md5"] not in prints:
        return None
    kept = {"md5": right["md5"], "answers": answers, "ordered": ordered}
    return {"instruction": task["instruction"], "table": info, "solution": right["sql"], **kept}


def of_machine(task: Mapping[str, Any]) -> Task | None:
    """Read an official task on a machine; None if its script does not solve it in the sandbox."""
    how = task["evaluation_info"]
    scripts = task["initialization_command_item"], how["ground_truth_command_item"], how["evaluation_command_item"]
    start, solution, check = (script["script"] for script in scripts)
    with Sandbox("shell") as machine:
        began, _, ended = (machine.run(script)[0] for script in (start, solution, check))
    if began or ended:
        return None
    return {"instruction": task["instruction"], "start": start, "solution": solution, "check": check}
