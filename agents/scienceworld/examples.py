"""Worked examples for the action form `paper`: ScienceWorld's own solutions of training variations, shortened.

They are stored in examples.json; `python -m empo2.agents.scienceworld.examples` generates the file again.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ..text_game.actions import nearest
from ..text_game.game import FULL_SCORE
from .environment import Environment

FILE = Path(__file__).with_name("examples.json")
SHOWN = 2  # per episode, as in the authors' code
KEPT = SHOWN + 1  # per task, so that two are left when one is of the played variation

# Steps kept from the beginning and the end of a solution, and characters kept of each observation.
FIRST_STEPS, LAST_STEPS = 14, 8
OBSERVATION_CHARACTERS = 80
# ScienceWorld's solutions open every door, though `easy` starts with open ones, and some of their actions do nothing.
NO_EFFECT = ("The door is already open.", "No known action matches that input.")
# Places of things, which ScienceWorld's solutions contain and its list of valid actions does not.
PLACE = re.compile(r" in (inventory|outside)(?= to | on |$)")


@dataclass(frozen=True)
class Example:
    """A solved episode.

    variation: of the task; a training variation.
    description: the task, in ScienceWorld's words.
    steps: actions with their observations. A step without an action tells how many steps are left out.
    """

    variation: int
    description: str
    steps: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = (f"> {action}\n{observation}" if action else observation for action, observation in self.steps)
        return "\n".join([self.description, *lines])


def examples(task: str, variation: int) -> list[Example]:
    """Return the two examples that an episode of `variation` is shown; never one of that variation."""
    others = (example for example in _all()[task] if example.variation != variation)
    return list(itertools.islice(others, SHOWN))


def make(task: str) -> list[Example]:
    """Solve the last training variations of a task; the first ones are trained on.

    ScienceWorld's solutions use names that its list of valid actions does not have, so the agent would execute other
    actions. They are therefore translated into valid actions. If these do not reach the full score, the solution is
    kept in its own words.
    """
    # A simulator of its own: the names in the list of valid actions depend on what a simulator played before.
    with Environment() as environment:
        train, *_ = environment.split(task)
        solved = (_solve(environment, task, variation) for variation in reversed(train))
        return list(itertools.islice(filter(None, solved), KEPT))


def _solve(environment: Environment, task: str, variation: int) -> Example | None:
    """Return an example; None if ScienceWorld's own solution misses the full score, as some do."""
    steps, score = _play(environment, task, variation, environment.gold_path(task, variation, "easy"), translate=False)
    if score != FULL_SCORE:
        return None
    steps = [step for step in steps if step[1] not in NO_EFFECT]
    path = [action for action, _ in steps]
    translated, score = _play(environment, task, variation, path, translate=True)
    best = translated if score == FULL_SCORE else steps
    return Example(variation, " ".join(environment.task_description.split()), shorten(best))


def _play(
    environment: Environment, task: str, variation: int, path: Sequence[str], translate: bool
) -> tuple[list[tuple[str, str]], float]:
    """Return the actions taken, each with its observation, and the score."""
    state = environment.reset(task, variation, "easy", len(path))
    steps = []
    for gold in path:
        action = valid_form(gold, state.valid_actions) if translate else gold
        if action is None:
            continue
        state = environment.step(action)
        steps.append((action, state.observation))
        if state.done:
            break
    return steps, state.score


def valid_form(action: str, valid_actions: Sequence[str]) -> str | None:
    """Return the valid action that best matches an action of a solution; None if no valid action has its verb."""
    if action in valid_actions:
        return action
    action = re.sub("^drop ", "put down ", PLACE.sub("", action))
    verb = action.partition(" ")[0]
    same_verb = [valid for valid in valid_actions if valid.partition(" ")[0] == verb]
    return nearest(action, same_verb) if same_verb else None


def shorten(steps: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Write repetitions once, cut observations, and keep only the beginning and the end."""
    short = []
    for action, group in itertools.groupby(steps, key=lambda step: step[0]):
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

    argparse.ArgumentParser(
        prog="python -m empo2.agents.scienceworld.examples",
        description=f"Solve training variations of all tasks and write {FILE.name} again (half an hour).",
    ).parse_args()
    made = {}
    for task in TASKS:
        made[task] = [asdict(example) for example in make(task)]
        print(task, flush=True)
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
