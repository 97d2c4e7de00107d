"""Plays rollouts with one agent class, in a process of its own and a world of three rooms.

    framework_player.py MODULE:CLASS

Each line of input is a JSON object of environment variables, and is answered by the actions that the agent took.
"""

import importlib
import json
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


def main() -> None:
    module, name = sys.argv[1].split(":")
    loaded = getattr(importlib.import_module(module), name)
    shared = sys.modules.get("empo2.agents.frameworks.shared", agent)
    for line in sys.stdin:
        os.environ.update(json.loads(line))
        corridor = Corridor()
        for user in (agent, shared):
            setattr(user, "Environment", lambda corridor=corridor: nullcontext(corridor))  # noqa: B010
        loaded().run()
        print(json.dumps(corridor.actions), flush=True)


if __name__ == "__main__":
    main()
