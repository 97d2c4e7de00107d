"""Plays rollouts with an agent class in a world of three rooms, in a process of its own."""

import importlib
import os
import sys
from contextlib import nullcontext
from typing import Any

from empo2.agents.scienceworld import agent
from empo2.agents.scienceworld.environment import State

OBSERVATIONS = ["Ein Café. 部屋には猫がいる 🐈", "naïve e\u0301\u200b", "You see: \ttwo  doors\n\n", "The end."]
STEPS = len(OBSERVATIONS) - 1


class Corridor:
    """In the place of ScienceWorld: each action leads to the next room. It is over in the last one."""

    task_description = "Find the way out. 出口"

    def __init__(self) -> None:
        self.actions: list[str] = []

    def reset(self, *episode: Any) -> State:
        return self._state()

    def step(self, action: str) -> State:
        self.actions.append(action)
        return self._state()

    def action_templates(self) -> list[str]:
        return ["go OBJ"]

    def _state(self) -> State:
        step = len(self.actions)
        return State(OBSERVATIONS[step], score=25 * step, done=step == STEPS, valid_actions=("go 1",))


def play_episode(agent_class: str, variables: dict[str, str]) -> list[str]:
    module, name = agent_class.split(":")
    loaded = getattr(importlib.import_module(module), name)
    os.environ.update(variables)
    corridor = Corridor()
    for user in (agent, sys.modules.get("empo2.agents.frameworks.shared", agent)):
        setattr(user, "Environment", lambda: nullcontext(corridor))  # noqa: B010
    loaded().run()
    return corridor.actions
