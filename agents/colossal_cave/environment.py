"""The cave: rooms, treasures, dwarves; 350 points. Checked against adventure 1.7 (PyPI)."""

from importlib import import_module
from typing import Any

from ..text_game.game import State

FULL_SCORE = 350
TASK = (
    "Explore the cave, find its treasures and bring them to the building. You have points for what you find, more for "
    "what you bring back, and fewer if you die."
)
_SAVES = ("suspe", "pause", "save")  # beginnings of words: they would write a file
_REFUSED = "That does nothing."


class Environment:
    """A started game. Equal seeds and actions give equal games: the seed decides what dwarves and pirate do."""

    task_description = TASK

    def __init__(self, seed: int, max_steps: int) -> None:
        adventure: Any = import_module("adventure")  # an optional package
        self._game: Any = import_module("adventure.game").Game(seed)
        adventure.load_advent_dat(self._game)
        self._game.start()
        self._steps_left = max_steps
        self.state = self._state(self._game.do_command(["no"]))  # no instructions

    def step(self, action: str) -> State:
        """Act. Raises RuntimeError after the episode's last step."""
        if not self._steps_left:
            raise RuntimeError("the episode has no steps left")
        self._steps_left -= 1
        words = action.lower().split()[:2]
        saves = any(word[:5] in _SAVES for word in words)
        return self._state(_REFUSED if saves or not words else self._game.do_command(words))

    def _state(self, observation: str) -> State:
        score, _ = self._game.compute_score(for_score_command=True)
        done = self._game.is_finished or not self._steps_left
        return State(observation.strip() or _REFUSED, score, done, ())
