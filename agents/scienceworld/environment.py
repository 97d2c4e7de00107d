"""ScienceWorld in a bounded Java process. Checked against scienceworld 1.2.3 (PyPI)."""

import re
import sys

from scienceworld import ScienceWorldEnv

from ..text_game.game import State
from ..text_game.java import JavaEnvironment, JavaShutdown


class Environment(JavaEnvironment["_Simulator"]):
    """ScienceWorld, for any number of episodes in sequence. Equal actions give equal trajectories.

    `inventory` names what the player carries, as of the last step.

    The score is ScienceWorld's own, -100..100. An episode may start above 0 (some `easy` starts score at once), and a
    failure sets it to -100.
    """

    def __init__(self) -> None:
        super().__init__(_Simulator)
        self.inventory: tuple[str, ...] = ()

    def split(self, task: str) -> tuple[list[int], list[int], list[int]]:
        """Return ScienceWorld's own train, dev and test variations of a task."""
        simulator = self._simulator
        simulator.load(task)
        return simulator.get_variations_train(), simulator.get_variations_dev(), simulator.get_variations_test()

    def reset(self, task: str, variation: int, simplification: str, max_steps: int) -> State:
        """Begin an episode; `task_description` then says what to do. Raises ValueError for an unknown variation."""
        variations = self._simulator.get_max_variations(task)
        if not 0 <= variation < variations:
            raise ValueError(f"variation {variation} of {task} does not exist: it has 0 to {variations - 1}")
        self._simulator.load(task, variation, simplification)
        observation, info = self._simulator.reset()
        self.task_description = info["taskDesc"].removeprefix("Task Description:").strip()
        self._steps_left = max_steps
        return self._state(observation, done=False, info=info)

    def gold_path(self, task: str, variation: int, simplification: str) -> list[str]:
        """Return the actions of ScienceWorld's own solution of a variation. Call `reset` before the next step."""
        self._simulator.load(task, variation, simplification, generateGoldPath=True)
        return self._simulator.get_gold_action_sequence()

    def action_templates(self) -> list[str]:
        """Return the forms of actions in this task under this simplification, such as `move OBJ to OBJ`."""
        return self._simulator.get_possible_actions()

    def _act(self, action: str) -> State:
        observation, _, done, info = self._simulator.step(action)
        return self._state(observation, done, info)

    def _state(self, observation: str, done: bool, info: dict) -> State:
        self.inventory = _names(info["inv"])
        return State(observation.strip(), info["score"], done, tuple(sorted(set(info["valid"]))))


class _Simulator(JavaShutdown, ScienceWorldEnv):
    def __init__(self) -> None:
        # Upstream's limit counts the world's ticks, and `wait` is ten of them, so JavaEnvironment counts the steps.
        super().__init__(envStepLimit=sys.maxsize)
        self._obj_tree_tempdir.cleanup()  # unused here, and a killed process would leave it behind


def _names(inventory: str) -> tuple[str, ...]:
    """Return the names in ScienceWorld's description of the inventory, without articles, contents and readings."""
    return tuple(
        re.findall(r"^\s+(?:an? |the |some )?(?:substance called )?([^,(\n]*[^,(\s])", inventory, re.MULTILINE)
    )
