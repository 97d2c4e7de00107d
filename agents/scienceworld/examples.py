"""Worked examples for the action form `paper`: ScienceWorld's own solutions of training variations, shortened.

They are kept in examples.json; `python -m empo2.agents.scienceworld.examples` makes the file anew.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ..text_game.actions import nearest
from ..text_game.game import FULL_SCORE
from .environment import Environment

FILE = Path(__file__).with_name("examples.json")
SHOWN = 2  # per episode, as in the authors' code
KEPT = SHOWN + 1  # per task, so that two are left when one is of the variation that is played

# What is left of a solution: so many steps from its beginning and from its end, so much of each observation.
FIRST_STEPS, LAST_STEPS = 14, 8
OBSERVATION_CHARACTERS = 80
NO_EFFECT = ("The door is already open.",)  # ScienceWorld opens every door, though `easy` has them open


@dataclass(frozen=True)
class Example:
    """A solved episode.

    variation: of the task; a training variation.
    description: the task, in ScienceWorld's words.
    steps: actions, each with what came of it. One without an action says how many steps are left out.
    """

    variation: int
    description: str
    steps: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = (f"> {action}\n{observation}" if action else observation for action, observation in self.steps)
        return "\n".join([self.description, *lines])


def examples(task: str, variation: int) -> list[Example]:
    """Return the two examples of a task that an episode of `variation` is shown, never of that variation itself."""
    others = (example for example in _all()[task] if example.variation != variation)
    return list(itertools.islice(others, SHOWN))


def make(environment: Environment, task: str) -> list[Example]:
    """Solve the last training variations of a task that ScienceWorld has a complete solution for.

    The last, since the first ones are trained on. Each action is the valid one nearest to ScienceWorld's, as the agent
    has it executed; a solution that does not reach the full score by them is passed over.
    """
    train, _ = environment.split(task)
    solved = (_solve(environment, task, variation) for variation in reversed(train))
    return list(itertools.islice(filter(None, solved), KEPT))


def _solve(environment: Environment, task: str, variation: int) -> Example | None:
    path = environment.gold_path(task, variation, "easy")
    state = environment.reset(task, variation, "easy", len(path))
    steps = []
    for action in path:
        valid = nearest(action, state.valid_actions)
        state = environment.step(valid)
        steps.append((valid, state.observation))
        if state.done:
            break
    if state.score != FULL_SCORE:
        return None
    return Example(variation, " ".join(environment.task_description.split()), shorten(steps))


def shorten(steps: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Leave out steps without effect, write repetitions once, cut observations, and keep the beginning and the end."""
    effective = (step for step in steps if step[1] not in NO_EFFECT)
    short = []
    for action, group in itertools.groupby(effective, key=lambda step: step[0]):
        *earlier, (_, observation) = group
        times = f" ({len(earlier) + 1} times)" if earlier else ""
        short.append((action, _cut(observation) + times))
    left_out = len(short) - FIRST_STEPS - LAST_STEPS
    if left_out > 1:
        short[FIRST_STEPS:-LAST_STEPS] = [("", f"[{left_out} steps]")]
    return tuple(short)


def _cut(observation: str) -> str:
    line = " ".join(observation.split())
    if len(line) <= OBSERVATION_CHARACTERS:
        return line
    return line[:OBSERVATION_CHARACTERS].rpartition(" ")[0] + " ..."


@cache
def _all() -> dict[str, list[Example]]:
    return {task: [_read(entry) for entry in entries] for task, entries in json.loads(FILE.read_text()).items()}


def _read(entry: dict) -> Example:
    return Example(entry["variation"], entry["description"], tuple((action, seen) for action, seen in entry["steps"]))


def main() -> None:
    from .tasks import TASKS

    with Environment() as environment:
        made = {task: [asdict(example) for example in make(environment, task)] for task in TASKS}
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
