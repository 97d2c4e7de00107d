"""Episodes to play and their results; ``results.jsonl``, an episode a line, is all the state that a result has."""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from empo2.recipe.config import NO_RESULT, flat
from empo2.recipe.errors import ConfigError, Empo2Error
from empo2.recipe.failures import FAILED_BY_SYSTEM
from empo2.recipe.run_folder import CHECKPOINTS, CONFIG_FILE, FACTS_FILE, MEMORY_FILE, read_lines, replace_file

RESULTS_FILE = "results.jsonl"
_NO_FACTS = NO_RESULT | {"sampling.server"}

_UNLIKE = {
    "rows": "was played on other tasks than",
    "groups": "has other groups of tasks than",
    "success_return": "has another algorithm.success_return than",
}

type MemoryUse = Literal["off", "read", "write", "read and write"]
"""``read``: the agent is shown tips; ``write``: its episode leaves a tip, and counts for the tips that it was shown."""


@dataclass(frozen=True)
class Episode:
    """Which episode of an evaluation it is."""

    part: str  # what it belongs to, such as ``memory off`` or ``seed 0, trial 3, panel``
    index: int  # of its row in the panel
    sample: int  # number of the repeat, from 0

    @property
    def key(self) -> tuple[str, int, int]:
        return self.part, self.index, self.sample


@dataclass(frozen=True)
class Planned(Episode):
    """An episode to play."""

    task: Mapping[str, Any]  # the row
    memory: MemoryUse = "off"
    explore: bool = False  # True for the temperature of training, False for that of validation


@dataclass(frozen=True)
class Result(Episode):
    """An episode that was played: a line of ``results.jsonl``."""

    return_: float | None  # the agent's reward, in its own units; None if the episode failed
    calls: int = 0  # that were answered
    calls_with_tips: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # that the agent reported beside its reward
    prompt_tokens: int = 0  # of all calls, as far as the server reports them
    reply_tokens: int = 0
    failed: str | None = None  # ``failed_by_agent`` or ``failed_by_system``
    error: str | None = None


class Results:
    """The results in a folder, written as they come; locked against other processes until `close`.

    Args:
        folder: made if absent.
        facts: what decides the results (model, panel, settings). A folder that has results of other facts is refused.

    Raises:
        ConfigError: another process writes to the folder, or it holds a run, a memory, or results of something else;
            the message names the fact that differs.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self._file = folder / RESULTS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            self._begin(facts)
        except BaseException:
            self.close()
            raise

    def _begin(self, facts: Mapping[str, Any]) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = "another process is writing to it; wait for it, or stop it"
            raise ConfigError(f"--output {self.folder}: {said}") from None
        before = read_facts(self.folder) if (self.folder / FACTS_FILE).exists() else None
        if before is None and any((self.folder / name).exists() for name in (CONFIG_FILE, MEMORY_FILE, CHECKPOINTS)):
            said = "has a run or a memory; give the results a folder of their own"  # what is played writes such files
            raise ConfigError(f"--output {self.folder}: {said}")
        self._found = {result.key: result for result in read_results(self.folder)}
        if before is None or not self._found:
            replace_file(self.folder / FACTS_FILE, json.dumps(facts, indent=1))
        else:
            _check_equal(self.folder, before, facts)
        self._rewrite()  # drops an incomplete last line, so that the next one starts on a line of its own

    def close(self) -> None:
        """Let other processes write to the folder."""
        os.close(self._lock)

    def missing(self, planned: Iterable[Planned]) -> list[Planned]:
        """Return the episodes that have no result yet, or one that the system's failure spoiled."""
        return [
            episode
            for episode in planned
            if (result := self._found.get(episode.key)) is None or result.failed == FAILED_BY_SYSTEM
        ]

    def add(self, result: Result) -> None:
        """Keep a result; it is on the disk when this returns."""
        self._found[result.key] = result
        with self._file.open("a") as stream:
            stream.write(_line(result))
            stream.flush()
            os.fsync(stream.fileno())

    def drop(self, part: str) -> None:
        """Forget the results of a part."""
        self._found = {key: result for key, result in self._found.items() if result.part != part}
        self._rewrite()

    def _rewrite(self) -> None:
        replace_file(self._file, "".join(map(_line, self._found.values())))


def kind_of(folder: Path) -> str:
    """Return what made the folder: ``eval``, ``adapt``, or ``run`` for anything else."""
    return read_facts(folder)["kind"] if (folder / FACTS_FILE).is_file() else "run"


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what decided the results in a folder."""
    return json.loads((folder / FACTS_FILE).read_text())


def require_comparable(played: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse results that do not compare with the first ones.

    Args:
        played: of each results their name, the tasks' checksum ``rows``, their ``groups``, and ``success_return``.
    """
    for name, facts in played:
        for fact, said in _UNLIKE.items():
            if facts[fact] != played[0][1][fact]:
                raise Empo2Error(f"{name}: {said} {played[0][0]}; compare results of one panel and one success_return")


def read_results(folder: Path) -> list[Result]:
    """Return the results in a folder; of several of one episode the last one."""
    found: dict[tuple[str, int, int], Result] = {}
    for values in read_lines(folder / RESULTS_FILE):
        result = Result(**{"return_" if name == "return" else name: value for name, value in values.items()})
        found[result.key] = result
    return list(found.values())


def _line(result: Result) -> str:
    values = {"return" if name == "return_" else name: value for name, value in asdict(result).items()}
    return json.dumps({name: value for name, value in values.items() if value is not None or name == "return"}) + "\n"


def _check_equal(folder: Path, before: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    had, has = dict(flat(before)), dict(flat(json.loads(json.dumps(facts))))
    for key in sorted({*had, *has} - _NO_FACTS):
        if had.get(key) != has.get(key):
            raise ConfigError(
                f"--output {folder}: its results have {key}={_short(had.get(key))}, this command "
                f"{key}={_short(has.get(key))}; give another --output, or remove that folder"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
