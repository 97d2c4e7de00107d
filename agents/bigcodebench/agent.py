"""The agent that writes BigCodeBench's functions.

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/bigcodebench/train.yaml
"""

import os
import sys

from ..sandbox import Sandbox
from ..sandbox import check as check_sandbox
from ..task_file import task_of
from ..text_game.actions import blocks
from ..text_game.agent import ContextOverflow, Server, TextAgent, connect
from ..text_game.game import Outcome
from .tasks import SECONDS, WORLD, Episode, program

PYTHON = "BIGCODEBENCH_PYTHON"  # a variable: the Python that runs the programs, in place of the agent's own

SYSTEM = (
    "You write Python programs. Reply with the whole program that is asked for, in one block that begins with "
    "```python and ends with ```. It is tested by cases that you do not see."
)


class BigCodeBenchAgent(TextAgent[Episode]):
    """Write one function; the variables are those of `Episode.env_map()`. The reward is 1 if all tests pass, else 0."""

    episode = Episode

    @staticmethod
    def check() -> str:
        """Return one line for a launcher to show before the first rollout. Raises OSError without a sandbox."""
        return check_sandbox()

    def play(self, episode: Episode, server: Server) -> Outcome:
        task = task_of(WORLD, episode.tasks, episode.task)
        with Sandbox("python", task["modules"], os.environ.get(PYTHON, sys.executable)) as sandbox:
            try:
                reply = connect(server)(
                    [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["instruction"]}]
                )
            except ContextOverflow:
                failed = ["the task is longer than the model's context"]
            else:
                tests, failed = sandbox.test(program(task, code_of(reply)), SECONDS)
                failed = failed if tests or failed else ["there were no tests"]
        return Outcome(int(not failed), f"{episode.task}: {failed[0] if failed else 'passed'}", full_score=1)


def code_of(reply: str) -> str:
    """Return the reply's last block that defines `task_func`, else a function, else its last block, else the reply.

    A block may be without an end, where the reply is.
    """
    found = blocks(reply, cut=True) or [reply]
    having = ([block for block in found if words in block] for words in ("def task_func", "def ", ""))
    return next(filter(None, having))[-1]
