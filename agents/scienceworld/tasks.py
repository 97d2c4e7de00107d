"""ScienceWorld's tasks by name, and the rows that say what one episode plays."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from scienceworld.constants import ID2TASK

from .environment import Environment

TASKS = tuple(ID2TASK.values())

# The 18 tasks of the EMPO2 paper's table (arXiv 2602.23008), which names them as ScienceWorld does.
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

# Actions per episode, as in the paper.
MAX_STEPS = 30
LONGER = {"chemistry-mix": 60, "measure-melting-point-known-substance": 120}

SIMPLIFICATIONS = (
    "easy",  # all of the others
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)

ActionForm = Literal["free-text", "choice"]


@dataclass(frozen=True)
class Episode:
    """All that fixes an episode but the policy. One row of a data set is `asdict` of it.

    Raises ValueError, naming the value and the nearest right ones, when a field is wrong. Whether the variation
    exists only ScienceWorld knows: `Environment.reset` says so.
    """

    task: str  # one of TASKS
    variation: int
    simplification: str  # some of SIMPLIFICATIONS, joined by commas; "" for none
    max_steps: int  # actions
    actions: ActionForm
    choices: int  # actions listed per turn in the choice form
    seed: int  # of the draw of the listed actions

    def __post_init__(self) -> None:
        _one_of(TASKS, "task", self.task)
        for part in filter(None, self.simplification.split(",")):
            _one_of(SIMPLIFICATIONS, "simplification", part)
        if "noElectricalAction" in self.simplification and _needs_electricity(self.task):
            raise ValueError(
                f"simplification {self.simplification!r}: {self.task} needs electrical actions; use 'easy'"
            )
        _one_of(get_args(ActionForm), "actions", self.actions)
        _positive("max_steps", self.max_steps)
        _positive("choices", self.choices)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables of ENV_MAP. Raises ValueError naming the variable that is missing or ill-typed."""
        row: dict[str, Any] = {}
        for variable, field in zip(ENV_MAP, fields(cls), strict=True):
            if variable not in environ:
                raise ValueError(f"{variable} is not set: the controller's env_map must map it to input.{field.name}")
            row[field.name] = read_integer(environ, variable) if field.type is int else environ[variable]
        return cls(**row)


# For agent-lightning's controller (`local.env_map`): the agent's variables and where a rollout's input holds them.
ENV_MAP = {f"SCIENCEWORLD_{field.name.upper()}": f"input.{field.name}" for field in fields(Episode)}


def load(
    names: Sequence[str],
    simplification: str = "easy",
    max_steps: int | None = None,
    actions: ActionForm = "free-text",
    choices: int = 12,
    train_variations: int = 5,
    test_variations: int = 20,
    seed: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train and validation rows of the named tasks, on ScienceWorld's own split of their variations.

    As in the paper: the first 5 train variations of a task (identify-life-stages-2 has but 4) and its first 20 test
    variations, or as many as there are. Without `max_steps` each task gets the paper's limit.

    Starts Java once, for about two seconds, and so also shows that it can be started. Raises ValueError for a wrong
    argument before that, FileNotFoundError where there is no Java.
    """
    if not names:
        raise ValueError(f"no task is named: name some of {', '.join(TASKS)}")
    _positive("train_variations", train_variations)
    _positive("test_variations", test_variations)

    def episode(task: str, variation: int) -> Episode:
        steps = paper_max_steps(task) if max_steps is None else max_steps
        return Episode(task, variation, simplification, steps, actions, choices, seed)

    first = [episode(task, variation=0) for task in names]  # checks every argument
    train, test = [], []
    with Environment() as environment:
        for task in (each.task for each in first):
            train_split, test_split = environment.split(task)
            train += [asdict(episode(task, variation)) for variation in train_split[:train_variations]]
            test += [asdict(episode(task, variation)) for variation in test_split[:test_variations]]
    return train, test


def paper_max_steps(task: str) -> int:
    """The paper's limit of actions per episode: 30 but for two tasks."""
    return LONGER.get(task, MAX_STEPS)


def read_integer(environ: Mapping[str, str], variable: str) -> int:
    """The variable's value as an integer. Raises ValueError naming variable and value."""
    try:
        return int(environ[variable])
    except ValueError:
        raise ValueError(f"{variable}={environ[variable]!r} is not an integer") from None


def _needs_electricity(task: str) -> bool:
    return "power-component" in task or "conductivity" in task


def _one_of(right: Iterable[str], key: str, value: str) -> None:
    right = list(right)
    if value not in right:
        nearest = difflib.get_close_matches(value, right, cutoff=0.4) or right
        raise ValueError(f"{key} {value!r} is unknown; nearest: {', '.join(nearest)}")


def _positive(key: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{key} {value} must be at least 1")
