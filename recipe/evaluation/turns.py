"""The turns of evaluated episodes, from which a critic can learn: ``turns.jsonl``, an episode a line."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.evaluation.episode_results import Result
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.messages import reply_of, spoken
from empo2.recipe.redaction import redacted
from empo2.recipe.run_folder import read_lines

TURNS_FILE = "turns.jsonl"


class Turn(NamedTuple):
    """A model call: the beginning of the chat's first user message, the state, and the reply."""

    task: str
    state: str
    action: str


class Episode(NamedTuple):
    """An episode that did not fail; its return is in the environment's own units."""

    return_: float
    turns: Sequence[Turn]


def turns_keeper(folder: Path, settings: Settings) -> Callable[[Result, Sequence[Mapping[str, Any]]], None]:
    """Return a function that keeps the turns of an episode, without secrets, given its result and its events.

    No text of a turn is longer than ``memory.state_characters``.
    """
    reader, characters = StateReader(settings.memory), settings.memory.state_characters

    def keep(result: Result, events: Sequence[Mapping[str, Any]]) -> None:
        turns = []
        for call in (event["data"] for event in events if event["event_type"] == "model_request"):
            reply = reply_of(call["response"]) if call.get("status") == "ok" else None
            if reply is not None:
                turns.append(Turn(*reader.task_and_state(call["request"]), spoken(reply)[:characters]))
        part, index, sample = result.key
        line = {"part": part, "index": index, "sample": sample, "return": result.return_, "turns": turns}
        with (folder / TURNS_FILE).open("a") as file:
            file.write(json.dumps(redacted(line)) + "\n")

    return keep


def read_turns(folder: Path) -> list[Episode]:
    """Return the episodes in a folder that have turns; a later line of an episode replaces an earlier one.

    Raises:
        ConfigError: there are none.
    """
    found = {
        (line["part"], line["index"], line["sample"]): Episode(line["return"], [Turn(*turn) for turn in line["turns"]])
        for line in read_lines(folder / TURNS_FILE)
        if line["turns"]
    }
    if not found:
        raise ConfigError(f"FOLDER {folder}: has no {TURNS_FILE}; it is written by empo2 eval with --keep-turns")
    return list(found.values())
