"""The rollouts of a run, as they were played and trained: a folder of Parquet files, one row a call.

The trainer writes a file when a step is over; `empo2 show` and the launcher read them. docs/runs.md has the columns.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from empo2.recipe.errors import Empo2Error

type Phase = Literal["training", "validation"]
type CallRow = dict[str, Any]
"""The columns of `SCHEMA` by name, of those in `_JSON` the value; those that are absent are null."""

_TEXT, _INTEGER, _NUMBER, _FLAGS = pa.string(), pa.int32(), pa.float64(), pa.list_(pa.bool_())
SCHEMA = pa.schema(
    {"rollout": _TEXT, "group": _TEXT, "step": _INTEGER, "phase": _TEXT, "mode": _TEXT, "scope": _TEXT, "task": _TEXT}
    | {"return": _NUMBER, "advantage": _NUMBER}
    | dict.fromkeys(("dropped", "cause", "example", "error", "output"), _TEXT)
    | {"enqueued": _NUMBER, "started": _NUMBER, "ended": _NUMBER}
    # the columns so far are the same in all rows of a rollout
    | {"call": _INTEGER, "begun": _NUMBER, "seconds": _NUMBER, "anew": pa.bool_()}
    | dict.fromkeys(("messages", "reply", "problem", "finish_reason"), _TEXT)
    | {"prompt_tokens": _INTEGER, "prompt_ids": pa.list_(_INTEGER), "response_ids": pa.list_(_INTEGER)}
    | {"log_probs": pa.list_(pa.float32()), "trained": _FLAGS, "masked": _FLAGS}
    | {"tip_ids": pa.list_(pa.int64()), "tips": pa.list_(_TEXT)}
    | {"visits": _INTEGER, "intrinsic": _NUMBER, "version": _INTEGER}
)
_JSON = ("task", "messages", "reply")
_LISTED = ["rollout", "step", "phase", "mode", "return", "advantage", "dropped", "call", "tip_ids"]


@dataclass(frozen=True)
class LoggedRollout:
    """A rollout in one line."""

    id: str  # agent-lightning's
    step: int
    phase: Phase
    mode: str  # ``memory, off-policy``, ``memory, on-policy`` or ``no memory``
    return_: float | None  # the environment's, None if the agent reported none
    advantage: float | None  # None if it was not trained on
    dropped: str | None  # why it was not used, such as ``failed_by_agent``; None if it was
    turns: int  # model calls
    tips: int  # different ones that it was shown


@dataclass(frozen=True)
class Dropped:
    """Rollouts that were dropped for the same reason and cause."""

    reason: str
    cause: str
    example: str  # the cause in the words of the first of them
    rollout: str  # the latest of them
    count: int  # in all steps from ``first`` to ``last``
    first: int
    last: int

    def told(self, run: Path) -> str:
        """Return it in one line, with the command that shows the latest of these rollouts."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        why = f"{self.reason.replace('_', ' ')}: {self.example}" if self.example else self.reason.replace("_", " ")
        return f"{self.count} of {steps}, {why}; empo2 show {run} {self.rollout[:8]}"


def write_rollouts(folder: Path, rows: Sequence[CallRow], keep: int | Literal["all"]) -> None:
    """Write rollouts of one step and phase to a file of their own, whole or not at all; remove steps before the last.

    Args:
        rows: one for each call, those of a rollout together; one without ``call`` for a rollout that made none.
        keep: how many steps, this one included.

    Raises:
        OSError: the file cannot be written, as on a full disk.
        ValueError, TypeError: a column does not take a value.
    """
    step, phase = rows[0]["step"], rows[0]["phase"]
    folder.mkdir(exist_ok=True)
    number = 1 + sum(1 for _ in folder.glob(f"{step:06}-{phase}-*.parquet"))  # a validation may have several batches
    file = folder / f"{step:06}-{phase}-{number:02}.parquet"
    temporary = folder / f".{file.name}.tmp"  # readers of a folder skip hidden files

    def text(value: Any) -> str | None:
        return None if value is None else json.dumps(value, ensure_ascii=False, default=str)

    table = pa.Table.from_pylist([row | {name: text(row.get(name)) for name in _JSON} for row in rows], SCHEMA)
    try:
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    if keep != "all":
        for old in [each for each in rollout_files(folder) if step_of_file(each) <= step - keep]:
            old.unlink()


def rollout_files(folder: Path, step: int | None = None) -> list[Path]:
    """Return the files of a folder, of one step or all, in the order of their steps."""
    return sorted(folder.glob(f"{'[0-9]' * 6 if step is None else f'{step:06}'}-*.parquet"))


def step_of_file(file: Path) -> int:
    return int(file.name.partition("-")[0])


def read_rollouts(
    folder: Path, prefix: str = "", step: int | None = None, *, last: int | None = None
) -> list[LoggedRollout]:
    """Return the rollouts whose ids begin with ``prefix``, of one step, of the last steps or of all, in their order.

    Raises:
        Empo2Error: there is no such folder, or a file cannot be read.
    """
    if not folder.is_dir():
        raise Empo2Error(f"{folder}: there is no such folder; training writes it when a step is over")
    files = rollout_files(folder, step)
    if last is not None and files:
        files = [file for file in files if step_of_file(file) > step_of_file(files[-1]) - last]
    found = []
    begins = pc.starts_with(pc.field("rollout"), prefix)  # pyright: ignore[reportAttributeAccessIssue]
    for calls in _by_rollout(_read(files, begins, _LISTED)):
        rollout, at, phase, mode, return_, advantage, dropped, *_ = calls[0].values()
        turns = sum(each["call"] is not None for each in calls)
        tips = {tip for each in calls for tip in each["tip_ids"] or ()}
        found.append(LoggedRollout(rollout, at, phase, mode, return_, advantage, dropped, turns, len(tips)))
    return found


def read_calls(folder: Path, rollout: str) -> list[CallRow]:
    """Return the rows of a rollout; an Empo2Error if a file cannot be read."""
    rows = _read(rollout_files(folder), pc.field("rollout") == rollout, SCHEMA.names)
    return [row | {name: row[name] and json.loads(row[name]) for name in _JSON} for row in rows]


def read_dropped(folder: Path, step: int | None = None) -> list[Dropped]:
    """Return why rollouts were dropped, in one step or in all, most frequent first; an Empo2Error as `read_calls`."""
    columns = ["rollout", "step", "dropped", "cause", "example"]
    found: dict[tuple[str, str], Dropped] = {}
    for calls in _by_rollout(_read(rollout_files(folder, step), pc.field("dropped").is_valid(), columns)):
        rollout, at, reason, cause, example = calls[0].values()
        before = found.get((reason, cause)) or Dropped(reason, cause, example, rollout, 0, at, at)
        found[reason, cause] = replace(before, rollout=rollout, count=before.count + 1, last=at)
    return sorted(found.values(), key=lambda dropped: -dropped.count)


def _read(files: Sequence[Path], where: pc.Expression, columns: Sequence[str]) -> list[CallRow]:
    try:
        stored = ds.dataset([str(file) for file in files], SCHEMA, format="parquet")
        return stored.to_table(columns=[*columns], filter=where).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise Empo2Error(f"a file of the run's rollouts cannot be read: {str(error).splitlines()[0]}") from None


def _by_rollout(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    return [list(calls) for _, calls in groupby(rows, key=lambda row: row["rollout"])]
