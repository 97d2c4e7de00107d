"""All games in one file: a zip with a member for each room, so that an agent unpacks the games of one room alone."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from lzma import LZMAError
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, BadZipFile, ZipFile, ZipInfo

from .engine import Engine
from .games import TASKS, Game, read_game

SPLITS = ("train", "valid_seen", "valid_unseen")
_FORMAT = 1
_INDEX = "index.json"
_REMEDY = "make it with `python -m empo2.agents.alfworld import FOLDER`"

Games = Mapping[str, Mapping[str, Game]]  # by split and name, such as "pick_and_place_simple-Mug-None-Desk-1/trial_0"


class ArchiveError(ValueError):
    """A file of games cannot be read; the message names it and the fix."""


class Archive:
    """A file of games made by `write`.

    Attributes:
        names: the names of the games by split, in the order of TASKS, then of the names.

    Raises:
        ArchiveError: there is no such file, or it is damaged or of another format.
    """

    def __init__(self, file: Path) -> None:
        require(file)
        self._file = file
        index = self._read(_INDEX)
        if index.get("format") != _FORMAT:
            raise ArchiveError(f"{file} is of format {index.get('format')}, not {_FORMAT}: {_REMEDY} anew")
        self.names: dict[str, list[str]] = index["names"]

    def game(self, split: str, name: str) -> Game:
        """Return a game. Raises ValueError if there is none of this name."""
        games = self._read(_member(split, name)) if name in self.names.get(split, ()) else {}
        if name not in games:
            raise ValueError(f"{self._file} has no game {name!r} in {split}")
        return Game.of(games[name])

    def _read(self, member: str) -> dict[str, Any]:
        try:
            with ZipFile(self._file) as archive:
                return json.loads(archive.read(member))
        except (OSError, BadZipFile, LZMAError, KeyError, EOFError, ValueError) as error:
            raise ArchiveError(
                f"{self._file} is no file of ALFWorld's games, or damaged ({error}): {_REMEDY}"
            ) from None


def require(file: Path) -> None:
    """Raise ArchiveError, naming the fix, unless the file is there."""
    if not file.is_file():
        raise ArchiveError(f"there is no file {file} of ALFWorld's games: {_REMEDY}")


def write(file: Path, games: Games) -> None:
    """Write games into a file, which appears whole or not at all. Equal games give equal files."""
    members = defaultdict[str, dict[str, Any]](dict)
    for split, of_split in games.items():
        for name, game in of_split.items():
            members[_member(split, name)][name] = game.as_row()
    names = {split: sorted(of_split, key=_official_order) for split, of_split in games.items()}
    part = file.with_name(f"{file.name}.part")
    try:
        with ZipFile(part, "w") as archive:
            for member, content in {_INDEX: {"format": _FORMAT, "names": names}, **members}.items():
                archive.writestr(ZipInfo(member), json.dumps(content), ZIP_LZMA)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def read_official(folder: Path, split: str) -> Iterator[tuple[str, Game]]:
    """Yield the games of a split of an official json_2.1.1 with their names, in the order of the names.

    They are those that the official environment plays: solvable ones of the six types, without sliced and stacked
    things. Each is won once by its own walkthrough.

    Raises ValueError, naming the file, for a game that cannot be read or is not won.
    """
    for file in sorted((folder / split).glob("*/*/game.tw-pddl")):
        name = file.parent.relative_to(folder / split).as_posix()
        if name.partition("-")[0] not in TASKS or "movable" in name or "Sliced" in name:
            continue
        try:
            content = json.loads(file.read_text())
            if not content.get("solvable"):
                continue
            game = read_game(content, _wordings(file.with_name("traj_data.json")))
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        engine = Engine(game)
        for command in game.walkthrough:
            engine.step(command)
        if not engine.won:
            raise ValueError(f"{file}: its walkthrough does not win; get the games of ALFWorld 0.4 (`move A to B`)")
        yield name, game


def _wordings(file: Path) -> list[str]:
    """Return what people wrote of a game's goal; nothing if the file is not there."""
    if not file.exists():
        return []
    return [said["task_desc"].strip() for said in json.loads(file.read_text())["turk_annotations"]["anns"]]


def _member(split: str, name: str) -> str:
    room = name.partition("/")[0].rpartition("-")[2]
    return f"{split}/{room}.json"


def _official_order(name: str) -> tuple[int, str]:
    return [*TASKS].index(name.partition("-")[0]), name
