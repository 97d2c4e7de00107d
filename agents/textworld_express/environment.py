"""TextWorld-Express in a bounded Java process. Checked against textworld-express 1.1.0 (PyPI)."""

import sys

from py4j.protocol import Py4JJavaError

from textworld_express import TextWorldExpressEnv

from ..text_game.game import State
from ..text_game.java import JavaEnvironment, JavaShutdown


class Environment(JavaEnvironment["_Simulator"]):
    """TextWorld-Express, for any number of episodes in sequence. Equal worlds and actions give equal trajectories.

    The score is the game's own, -1..1, times 100, so that ScienceWorld's settings for returns fit it too.
    """

    def __init__(self) -> None:
        super().__init__(_Simulator)

    def split(self, game: str, params: str) -> tuple[list[int], list[int]]:
        """Return the seeds of the game's train and test folds, 1,000 each. Raises ValueError for wrong `params`."""
        self._load(game, params)
        return self._simulator.getValidSeedsTrain(), self._simulator.getValidSeedsTest()

    def reset(self, game: str, params: str, fold: str, seed: int, max_steps: int) -> State:
        """Begin an episode; `task_description` then says what to do. Raises ValueError for wrong `params`."""
        self._load(game, params)
        try:
            observation, info = self._simulator.reset(seed=seed, gameFold=fold)
        except Py4JJavaError as error:
            raise ValueError(f"params {params!r} of {game}: {error.java_exception.getMessage()}") from None
        self.task_description = info["taskDescription"].strip()
        self._steps_left = max_steps
        return _state(observation, done=False, info=info)

    def _act(self, action: str) -> State:
        observation, _, done, info = self._simulator.step(action)
        return _state(observation, done, info)

    def _load(self, game: str, params: str) -> None:
        for setting in filter(None, params.split(",")):
            if not setting.partition("=")[2].strip().isdecimal():  # upstream would play without a world
                raise ValueError(f"params {params!r} of {game}: {setting!r} must be NAME=NUMBER")
        try:
            self._simulator.load(game, params)
        except ValueError as error:
            raise ValueError(f"params {params!r} of {game}: {error}") from None


class _Simulator(JavaShutdown, TextWorldExpressEnv):
    def __init__(self) -> None:
        super().__init__(envStepLimit=sys.maxsize)  # steps are counted in JavaEnvironment
        self._obj_tree_tempfile.close()  # unused here


def _state(observation: str, done: bool, info: dict) -> State:
    return State(observation.strip(), round(100 * info["score"]), done, tuple(sorted(set(info["validActions"]))))
