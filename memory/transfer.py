"""Export a memory as JSON lines and import it, into another embedder's memory or on top of another memory.

The first line is a ``meta`` record; then come ``tip``, ``state`` and ``play`` records, each in the order in which they
were stored. No record holds an embedding: an import embeds every state again.
"""

import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from empo2.memory.browse import embedder_of, episode_steps, plays, stored_tips
from empo2.memory.embedder import Embedder
from empo2.memory.file import SCHEMA_VERSION, MemoryFileError, copy_memory, reading
from empo2.memory.index import unit
from empo2.memory.novelty import ADD_STATE, MAX_VISITS
from empo2.memory.store import MAX_TIP_CHARACTERS, MemoryStore, Step

_BATCH = 64  # texts between two steps of the progress
_Count = Annotated[int, Field(ge=0, le=MAX_VISITS)]
_Positive = Annotated[int, Field(ge=1, le=MAX_VISITS)]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("a tip cannot be blank")
    return text


class StepRecord(TypedDict):
    state: str
    action: str


class MetaRecord(TypedDict):
    kind: Literal["meta"]
    schema: int
    embedder: str
    dimension: int


class TipRecord(TypedDict):
    kind: Literal["tip"]
    scope: str
    episode: str
    text: Annotated[str, Field(max_length=MAX_TIP_CHARACTERS), AfterValidator(_not_blank)]
    score: float
    success: bool | None
    value: float
    created: float
    steps: Annotated[list[StepRecord], Field(min_length=1)]


class StateRecord(TypedDict):
    kind: Literal["state"]
    scope: str
    state: str
    visits: _Positive


class PlayRecord(TypedDict):
    """A play; ``shown`` maps each tip's episode to the number of turns it was shown in, without tips dropped since."""

    kind: Literal["play"]
    scope: str
    episode: str
    score: float
    success: bool | None
    searches: _Count
    hits: _Count
    created: float
    shown: dict[str, _Positive]


type Record = MetaRecord | TipRecord | StateRecord | PlayRecord

_RECORD: TypeAdapter[Record] = TypeAdapter(
    Annotated[Record, Field(discriminator="kind")],
    config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False),
)


@dataclass(frozen=True)
class Records:
    """A complete export."""

    tips: list[TipRecord]
    states: list[StateRecord]
    plays: list[PlayRecord]


def export_records(db: sqlite3.Connection) -> Iterator[Record]:
    """Return the content of a memory file, except its keys and the credits of dropped tips."""
    embedder, dimension = embedder_of(db)
    yield MetaRecord(kind="meta", schema=SCHEMA_VERSION, embedder=embedder, dimension=dimension)
    for tip in sorted(stored_tips(db, order="newest")):  # by id
        fields = {name: value for name, value in tip._asdict().items() if name not in ("id", "shown")}
        steps = [StepRecord(state=state, action=action) for state, action in episode_steps(db, tip)]
        yield TipRecord(kind="tip", **fields, steps=steps)
    for scope, state, visits in db.execute("SELECT scope, state, visits FROM states ORDER BY id"):
        yield StateRecord(kind="state", scope=scope, state=state, visits=visits)
    for play in plays(db):
        shown = db.execute(
            "SELECT tips.episode, turns FROM credits JOIN tips ON tips.id = tip_id"
            " WHERE credits.episode = ? ORDER BY tip_id",
            (play.episode,),
        )
        yield PlayRecord(kind="play", **play._asdict(), shown=dict(shown.fetchall()))


def read_records(file: Path) -> Records:
    """Read an export from a file, and check every line.

    Raises:
        MemoryFileError: a line that cannot be used; the message has its number and the reason.
        OSError: the file cannot be read.
    """
    by_kind: dict[str, list] = {"meta": [], "tip": [], "state": [], "play": []}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = _RECORD.validate_json(line)
            except ValidationError as error:
                raise MemoryFileError(f"{file}: line {number}: {_reason(error)}") from None
            if (record["kind"] == "meta") != (number == 1):
                raise MemoryFileError(f"{file}: line {number}: the first line, and only that, is a 'meta' record")
            if record["kind"] == "meta" and record["schema"] != SCHEMA_VERSION:
                raise MemoryFileError(
                    f"{file}: line {number}: has memory schema {record['schema']}; this version of empo2 reads schema"
                    f" {SCHEMA_VERSION}"
                )
            by_kind[record["kind"]].append(record)
    if not by_kind["meta"]:
        raise MemoryFileError(f"{file}: is empty; an export begins with a 'meta' record")
    return Records(by_kind["tip"], by_kind["state"], by_kind["play"])


def import_records(
    path: Path,
    records: Records,
    embedder: Embedder,
    progress: Callable[[Sequence[tuple[str, ...]]], Iterable[tuple[str, ...]]],
) -> tuple[int, int]:
    """Add an export to a memory file, or to a new one; a failed or killed import changes nothing.

    Every state is embedded again, each text once. A tip or play whose episode is already stored is skipped, and so is a
    tip without a new step; the visits of a known state are added up. Nothing is dropped, whatever the capacity of the
    next run that uses the memory. Values are stored as exported, since they already include the effect of the plays.

    Args:
        progress: wraps the iterator over batches of texts, to show progress.

    Returns:
        The numbers of tips and of plays that were added.

    Raises:
        MemoryFileError: the file is in use, or made with another embedder.
    """

    def open_store(file: Path) -> MemoryStore:
        return MemoryStore(file, embedder=embedder.name, dimension=embedder.dimension, capacity=sys.maxsize)

    def fill(file: Path) -> tuple[int, int]:
        states = [step["state"] for tip in records.tips for step in tip["steps"]]
        texts = dict.fromkeys([*states, *(state["state"] for state in records.states)])
        keys: dict[str, np.ndarray] = {}
        for batch in progress(list(batched(texts, _BATCH))):
            keys.update(zip(batch, embedder.embed(batch), strict=True))
        with closing(open_store(file)) as store:
            tips = sum(_add_tip(store, tip, keys) for tip in records.tips)
        with reading(file) as db:
            stored = db.execute("SELECT scope, state, id FROM states ORDER BY id DESC")  # the first of equals counts
            known = {(scope, state): state_id for scope, state, state_id in stored}
        with closing(sqlite3.connect(file)) as db, db:
            for state in records.states:
                _add_visits(db, state, known, keys[state["state"]])
            return tips, sum(_add_play(db, play) for play in records.plays)

    with TemporaryDirectory(prefix=f"{path.name}.import-", dir=path.parent) as folder:
        copy = Path(folder, path.name)
        if not path.exists():
            added = fill(copy)
            copy_memory(copy, path)
            return added
        with closing(open_store(path)) as store:  # which locks it
            store.snapshot(copy)
            added = fill(copy)
            store.restore(copy)
            return added


def _add_tip(store: MemoryStore, tip: TipRecord, keys: Mapping[str, np.ndarray]) -> bool:
    steps = [Step(step["state"], keys[step["state"]], step["action"]) for step in tip["steps"]]
    given: dict[str, Any] = {name: tip[name] for name in ("score", "success", "value", "created")}
    return store.add_episode(tip["scope"], tip["episode"], tip=tip["text"], steps=steps, **given) is not None


def _add_visits(db: sqlite3.Connection, state: StateRecord, known: dict[tuple[str, str], int], key: np.ndarray) -> None:
    """Add visits to the state with exactly this text, or store it, however similar to others."""
    place = state["scope"], state["state"]
    if place in known:
        query = "UPDATE states SET visits = min(visits + ?, ?) WHERE id = ?"
        db.execute(query, (state["visits"], MAX_VISITS, known[place]))
    else:
        stored = (*place, unit(key, len(key)).tobytes(), state["visits"])
        (known[place],) = db.execute(ADD_STATE, stored).fetchone()


def _add_play(db: sqlite3.Connection, play: PlayRecord) -> bool:
    """Insert a play directly: `MemoryStore.record_play` would update the values again and date the play today."""
    new = db.execute(
        "INSERT INTO plays (episode, scope, score, success, searches, hits, created)"
        " VALUES (:episode, :scope, :score, :success, :searches, :hits, :created) ON CONFLICT (episode) DO NOTHING",
        play,
    ).rowcount
    if new:
        db.executemany(
            "INSERT INTO credits SELECT ?, id, ? FROM tips WHERE episode = ?",
            [(play["episode"], turns, tip) for tip, turns in play["shown"].items()],
        )
    return bool(new)


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"][1:])  # after the record's kind
    reason = " ".join(first["msg"].split())  # it may quote the line
    return f"{where}: {reason}" if where else reason
