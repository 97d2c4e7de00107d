"""A game of TextWorld, made by its generator and Inform 7. Checked against textworld 1.7.0 (PyPI)."""

import os
import re
import tempfile
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ..text_game.game import FULL_SCORE, State

_ENDED = "Would you like to RESTART"
_BLANKS = re.compile(r"\n\s*\n\s*\n+")
_NEXT = re.compile(r"\.|\bthen\b", re.IGNORECASE)  # between the actions of a line
# Commands that write files, ask questions that no action answers, or tell the whole state; also after "me," or "oops".
# The engine reads nine letters of a word. A thing may be of "type Q".
_COMMANDS = re.compile(
    r"\b(?:save|restore|restart|quit|(?:un)?script|transcrip\w*|print_st\w*|tw-\w+|enable|disable|restrict)\b"
    r"|(?:^|,|\b(?:oops|o)\b)\W*q\b",
    re.IGNORECASE,
)
_REFUSED = "That does nothing."


def game_file(rooms: int, objects: int, quest: int, seed: int) -> Path:
    """Return the file of a game, made if it is not in the cache, which takes about two seconds of a core.

    Equal arguments give equal games. The goal names the quest's last action alone, so that the way must be found.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "empo2" / "textworld"
    file = cache / f"{rooms}-{objects}-{quest}-{seed}.z8"
    if not file.exists():
        textworld: Any = import_module("textworld")  # an optional package
        options = textworld.GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = seed, rooms, objects, quest
        options.grammar.only_last_action = True
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # another process may be making it, too
            options.path = f"{folder}/game.z8"
            textworld.make(options)
            Path(folder, "game.json").replace(file.with_suffix(".json"))  # of which the engine reads what is won
            Path(options.path).replace(file)
    return file


class Environment:
    """A started game. Equal games and actions give equal states. An action is a line's first one."""

    def __init__(self, file: Path, max_steps: int) -> None:
        textworld: Any = import_module("textworld")
        names = ("admissible_commands", "description", "objective", "won", "lost", "score", "max_score")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Jericho does not know a game that was made just now
            self._game = textworld.start(str(file), textworld.EnvInfos(**dict.fromkeys(names, True)))
            first = self._game.reset()
        self._steps_left = max_steps
        self.task_description = " ".join(first.objective.split())
        self.state = self._state(first.description, first)

    def step(self, action: str) -> State:
        """Act. Raises RuntimeError after the episode's last step."""
        if not self._steps_left:
            raise RuntimeError("the episode has no steps left")
        self._steps_left -= 1
        # What is unprintable ends the process, and a backslash begins a command of the interpreter.
        plain = "".join(letter if letter.isprintable() and letter != "\\" else " " for letter in action)
        first = _NEXT.split(plain)[0].strip()
        if _COMMANDS.search(first):
            return replace(self.state, observation=_REFUSED, done=not self._steps_left)
        state, *_ = self._game.step(first or "look")
        self.state = self._state(state.feedback, state)
        return self.state

    def _state(self, text: str, state: Any) -> State:
        shown = _BLANKS.sub("\n\n", text.rpartition("\n>")[0] or text).partition(_ENDED)[0].strip()
        done = bool(state.won or state.lost) or not self._steps_left
        score = FULL_SCORE * state.score / state.max_score
        return State(shown, score, done, tuple(sorted(state.admissible_commands or ())))
