"""One episode of any text game as turns: what the policy is shown, and what its reply does.

The whole chat is sent at every turn and never rewritten, so each turn is kept short.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .episode import TextEpisode

FULL_SCORE = 100
NOT_LISTED = "Nothing was done: your reply named no listed number."


@dataclass(frozen=True)
class State:
    """What one step of a game shows.

    observation: the game's own reply, unchanged but for surrounding blanks.
    score: of the episode so far, -100..100; the last one is the return.
    done: the task is completed, has failed, or `max_steps` actions were taken.
    valid_actions: all valid actions, sorted, so that equal states list them equally.
    """

    observation: str
    score: float
    done: bool
    valid_actions: tuple[str, ...]


class TextEnvironment(Protocol):
    """The world of a text game, in which an episode has begun."""

    @property
    def task_description(self) -> str: ...

    def step(self, action: str) -> State: ...


@dataclass(frozen=True)
class Outcome:
    """How an episode ended: its score, -100..100, and one line saying where it came from."""

    score: float
    message: str

    @property
    def success(self) -> bool:
        return self.score == FULL_SCORE


class TextGame:
    """One episode, begun: show `system`, then `turn` and `act` on the reply, until it is `done`.

    system: the rules, for the system message.
    turn: what the policy is to be shown next; the last observation when the episode is done.
    """

    def __init__(self, environment: TextEnvironment, episode: TextEpisode, system: str, state: State) -> None:
        self._environment, self.episode, self._state = environment, episode, state
        self._steps = 0
        self.system = system
        self._show(f"{environment.task_description}\n\n{state.observation}")

    @property
    def done(self) -> bool:
        return self._state.done or self._steps == self.episode.max_steps

    def act(self, reply: str) -> None:
        """Take the action that a reply names. A reply that names none is a step too; one after the end is ignored."""
        if self.done:
            return
        action = chosen(reply, self._choices) if self._choices else typed(reply)
        self._steps += 1
        if action is not None:
            self._state = self._environment.step(action)
        self._show(NOT_LISTED if action is None else self._state.observation)

    def outcome(self, remark: str = "") -> Outcome:
        """The score so far."""
        steps = f"{self._steps} of {self.episode.max_steps} steps"
        return Outcome(self._state.score, f"{self.episode.title}: score {self._state.score:g} after {steps}{remark}")

    def _show(self, news: str) -> None:
        offered = self.episode.actions == "choice" and not self.done
        self._choices = draw(self._state.valid_actions, self.episode, self._steps) if offered else []
        self.turn = listed(news, self._choices) if self._choices else news


def listed(observation: str, choices: Sequence[str]) -> str:
    """A turn of the choice form: the observation and the numbered actions."""
    return "\n".join([observation, "", *(f"{number} {action}" for number, action in enumerate(choices, start=1))])


def draw(valid_actions: Sequence[str], episode: TextEpisode, step: int) -> list[str]:
    """At most `episode.choices` of the valid actions, in random order.

    Seeded by the episode and the step: rollouts that acted alike are offered alike.
    """
    generator = random.Random(f"{episode.seed} {episode.world} {step}")
    return generator.sample(valid_actions, min(episode.choices, len(valid_actions)))


def typed(reply: str) -> str:
    """The action of a free-text reply: its first line, whatever it says."""
    return reply.strip().partition("\n")[0].strip()


def chosen(reply: str, choices: Sequence[str]) -> str | None:
    """The action whose number is the first in the reply; None where the reply names no listed number."""
    number = re.search(r"[0-9]+", reply)
    by_number = {str(number): action for number, action in enumerate(choices, start=1)}
    return by_number.get(number.group().lstrip("0")) if number else None
