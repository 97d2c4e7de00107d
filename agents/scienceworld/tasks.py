"""ScienceWorld's tasks by name, and the task rows, each of which defines one episode."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scienceworld.constants import ID2TASK

from ..text_game.episode import ActionForm, TextEpisode, one_of, positive
from .environment import Environment

TASKS = tuple(ID2TASK.values())

# The 18 tasks of the EMPO2 paper's table (arXiv 2602.23008), by ScienceWorld's names.
PAPER_TASKS = (
    "chemistry-mix",
    "chemistry-mix-paint-secondary-color",
    "chemistry-mix-paint-tertiary-color",
    "find-animal",
    "find-living-thing",
    "find-non-living-thing",
    "find-plant",
    "identify-life-stages-1",
    "identify-life-stages-2",
    "lifespan-longest-lived",
    "lifespan-longest-lived-then-shortest-lived",
    "lifespan-shortest-lived",
    "power-component",
    "power-component-renewable-vs-nonrenewable-energy",
    "test-conductivity",
    "test-conductivity-of-unknown-substances",
    "measure-melting-point-known-substance",
    "use-thermometer",
)

TASK_SETS = {"paper": PAPER_TASKS, "all": TASKS}

# Actions per episode, as in the paper.
MAX_STEPS = 30
LONGER = {"chemistry-mix": 60, "measure-melting-point-known-substance": 120}

SIMPLIFICATIONS = (
    "easy",  # all of the others but openContainers; and noElectricalAction only where the task allows it
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)


@dataclass(frozen=True, kw_only=True)
class Episode(TextEpisode):
    """An episode of ScienceWorld.

    Raises ValueError, naming the value and the nearest right ones, when a field is wrong. Only ScienceWorld knows
    which variations exist: `Environment.reset` checks that.
    """

    variables = "SCIENCEWORLD"
    forms = ("free-text", "choice", "paper", "meta")

    task: str  # one of TASKS
    variation: int
    simplification: str  # some of SIMPLIFICATIONS, joined by commas; "" for none

    def __post_init__(self) -> None:
        one_of(TASKS, "task", self.task)
        for part in filter(None, self.simplification.split(",")):
            one_of(SIMPLIFICATIONS, "simplification", part)
        if "noElectricalAction" in self.simplification and _needs_electricity(self.task):
            raise ValueError(
                f"simplification {self.simplification!r}: {self.task} needs electrical actions; use 'easy'"
            )
        super().__post_init__()

    @property
    def world(self) -> str:
        return f"{self.task} {self.variation}"

    @property
    def title(self) -> str:
        return f"{self.task} variation {self.variation}"


ENV_MAP = Episode.env_map()


def load(
    names: str | Sequence[str],
    simplification: str = "easy",
    max_steps: int | None = None,
    actions: ActionForm = "free-text",
    choices: int = 12,
    train_variations: int = 5,
    test_variations: int = 20,
    test_split: Literal["dev", "test"] = "test",
    seed: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return train and validation rows of the named tasks, on ScienceWorld's own split of their variations.

    `names` is a list of tasks, one task, or a set: "paper" for the paper's 18 tasks, "all" for all 30.

    As in the paper, these are the first 5 train variations of a task (identify-life-stages-2 has only 4) and the first
    20 test variations, or all if there are fewer: 89 and 265 rows for "paper". With `test_split` "dev" the latter are
    of ScienceWorld's dev split. Without `max_steps` each task gets the paper's limit.

    Starts Java once, for about two seconds, which also checks that it can be started. Raises ValueError for a wrong
    argument before that, FileNotFoundError without Java.
    """
    if isinstance(names, str):
        one_of([*TASK_SETS, *TASKS], "names", names)
        names = TASK_SETS.get(names, (names,))
    if not names:
        raise ValueError(f"no task is named: name some of {', '.join(TASKS)}")
    positive("train_variations", train_variations)
    positive("test_variations", test_variations)
    one_of(("dev", "test"), "test_split", test_split)

    common: Any = {"simplification": simplification, "actions": actions, "choices": choices, "seed": seed}

    def episode(task: str, variation: int) -> Episode:
        steps = paper_max_steps(task) if max_steps is None else max_steps
        return Episode(task=task, variation=variation, max_steps=steps, **common)

    first = [episode(task, variation=0) for task in names]  # checks every argument
    train, test = [], []
    with Environment() as environment:
        for task in (each.task for each in first):
            trained, dev, tested = environment.split(task)
            held_out = dev if test_split == "dev" else tested
            train += [asdict(episode(task, variation)) for variation in trained[:train_variations]]
            test += [asdict(episode(task, variation)) for variation in held_out[:test_variations]]
    return train, test


def paper_max_steps(task: str) -> int:
    """Return the paper's limit of actions per episode: 30, except for two tasks."""
    return LONGER.get(task, MAX_STEPS)


def _needs_electricity(task: str) -> bool:
    return "power-component" in task or "conductivity" in task
