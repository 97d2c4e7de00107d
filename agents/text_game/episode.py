"""The fields that define an episode of a text game, and how environment variables pass them to an agent."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

FULL_SCORE = 100

# How a policy acts: it writes any line; it writes the number of a listed action; it writes a line, and the nearest
# valid action is executed, as in the EMPO2 paper; it thinks and names an action between tags, as in verl-agent; or it
# plans, explores, reflects or monitors between tags, as in RLVMR.
ActionForm = Literal["free-text", "choice", "paper", "tags", "meta"]


@dataclass(frozen=True, kw_only=True)
class ChatEpisode:
    """The definition of an episode, without the policy. One row of a data set is `asdict` of it.

    A world's subclass adds its fields. Raises ValueError, naming the value and the nearest valid ones, if a field is
    wrong.
    """

    variables: ClassVar[str]  # the beginning of the names of the agent's variables

    @classmethod
    def env_map(cls) -> dict[str, str]:
        """Return agent-lightning's `local.env_map`: from variables to fields of a rollout's input."""
        return {f"{cls.variables}_{field.name.upper()}": f"input.{field.name}" for field in fields(cls)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables of `env_map`. Raises ValueError naming the variable that is missing or ill-typed."""
        row: dict[str, Any] = {}
        for variable, field in zip(cls.env_map(), fields(cls), strict=True):
            if variable not in environ:
                raise ValueError(f"{variable} is not set: the controller's env_map must map it to input.{field.name}")
            row[field.name] = read_integer(environ, variable) if field.type is int else environ[variable]
        return cls(**row)


@dataclass(frozen=True, kw_only=True)
class TextEpisode(ChatEpisode):
    """An episode of a text game, whose turns may list valid actions."""

    forms: ClassVar[tuple[ActionForm, ...]] = ("free-text", "choice")

    max_steps: int  # actions
    actions: ActionForm  # one of `forms`
    choices: int  # actions listed per turn in the choice form
    seed: int  # of the draw of the listed actions

    def __post_init__(self) -> None:
        one_of(self.forms, "actions", self.actions)
        positive("max_steps", self.max_steps)
        positive("choices", self.choices)

    @property
    def world(self) -> str:
        """Return the world's name. Together with `seed` it seeds the draw of the listed actions."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """Return the world's name for people to read."""
        raise NotImplementedError

    @property
    def full_score(self) -> float:
        """Return the score of a success."""
        return FULL_SCORE


def read_integer(environ: Mapping[str, str], variable: str) -> int:
    """Return the variable's value as an integer. Raises ValueError naming variable and value."""
    try:
        return int(environ[variable])
    except ValueError:
        raise ValueError(f"{variable}={environ[variable]!r} is not an integer") from None


def one_of(right: Iterable[str], key: str, value: str) -> None:
    """Raise ValueError, naming the nearest right values, unless `value` is one of `right`."""
    right = list(right)
    if value not in right:
        nearest = difflib.get_close_matches(value, right, cutoff=0.4) or right
        raise ValueError(f"{key} {value!r} is unknown; nearest: {', '.join(nearest)}")


def positive(key: str, value: int) -> None:
    """Raise ValueError if `value` is below 1."""
    if value < 1:
        raise ValueError(f"{key} {value} must be at least 1")
