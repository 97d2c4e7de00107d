"""One episode of a text game as turns: show messages to the policy, and act on its replies.

The whole chat is sent in every turn and never rewritten, so each turn is kept short.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .actions import META_THOUGHTS, chosen, draw, listed, nearest, tagged, typed
from .episode import FULL_SCORE, TextEpisode

NOT_LISTED = "Nothing was done: your reply named no listed number."


@dataclass(frozen=True)
class State:
    """The result of one step of a game.

    observation: the game's own reply, without surrounding blanks.
    score: of the episode so far, -100..100; the last one is the return.
    done: the task is completed, has failed, or `max_steps` actions were taken.
    valid_actions: all valid actions, sorted, so that equal states list them equally.
    """

    observation: str
    score: float
    done: bool
    valid_actions: tuple[str, ...]


class TextEnvironment(Protocol):
    """The world of a text game with a started episode."""

    @property
    def task_description(self) -> str: ...

    def step(self, action: str) -> State: ...


@dataclass(frozen=True)
class Outcome:
    """The result of an episode: its score, a line that explains it, numbers to average, the score of a success, and the
    actions that led there, "" for a step without one."""

    score: float
    message: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    full_score: float = FULL_SCORE
    actions: Sequence[str] = ()

    @property
    def data(self) -> dict[str, Any]:
        """Return what the reward event has beside score, message and success."""
        return {"metrics": self.metrics, "actions": self.actions}

    @property
    def success(self) -> bool:
        return self.score == self.full_score


class TextGame:
    """One started episode: show `system`; then show `turn` and `act` on the reply until it is `done`.

    system: the rules, for the system message.
    turn: the next user message; the last observation when the episode is done.
    """

    def __init__(self, environment: TextEnvironment, episode: TextEpisode, system: str, state: State) -> None:
        self._environment, self.episode, self._state = environment, episode, state
        self._actions: list[str] = []
        self._replayed = self._corrected = self._invalid = 0
        self.system = system
        self._show(f"{environment.task_description}\n\n{state.observation}")

    @property
    def done(self) -> bool:
        return self._state.done or self._steps == self.episode.max_steps

    def act(self, reply: str) -> None:
        """Take the action that a reply names. One without an action is a step too; one after the end is ignored."""
        if self.done:
            return
        action = self._action(reply)
        self._invalid += action is None
        self._take(action)
        self._show(NOT_LISTED if action is None else self._state.observation)

    def replay(self, actions: Sequence[str]) -> None:
        """Take actions before the first turn, which then shows the task and what the last one came to."""
        for action in actions:
            self._take(action or None)
        self._replayed = len(actions)
        if actions:
            self._show(f"{self._environment.task_description}\n\n{self._state.observation}")

    def _take(self, action: str | None) -> None:
        self._actions.append(action or "")
        if action is not None:
            self._state = self._environment.step(action)

    @property
    def _steps(self) -> int:
        return len(self._actions)

    def outcome(self, remark: str = "") -> Outcome:
        """Return the score so far and the share of corrected actions (paper) or of invalid ones (the other forms)."""
        steps = f"{self._steps} of {self.episode.max_steps} steps"
        message = f"{self.episode.title}: score {self._state.score:g} after {steps}{remark}"
        invalid = "invalid_actions", self._invalid
        counts = {"paper": ("corrected_actions", self._corrected), "choice": invalid, "tags": invalid, "meta": invalid}
        name, count = counts.get(self.episode.actions, ("", 0))
        played = self._steps - self._replayed
        metrics = {name: count / played} if name and played else {}
        return Outcome(self._state.score, message, metrics, self.episode.full_score, self._actions)

    def _action(self, reply: str) -> str | None:
        """Return the action to execute; None if the reply names none."""
        if self._choices:
            return chosen(reply, self._choices)
        if self.episode.actions in ("tags", "meta"):
            action, valid = tagged(reply, META_THOUGHTS if self.episode.actions == "meta" else ("think",))
            self._invalid += not valid
            return action
        text = typed(reply)
        if self.episode.actions != "paper":
            return text
        action = nearest(text, self._state.valid_actions)
        self._corrected += action.lower().split() != text.lower().split()
        return action

    def _show(self, news: str) -> None:
        offered = self.episode.actions == "choice" and not self.done
        self._choices = draw(self._state.valid_actions, self.episode, self._steps) if offered else []
        self.turn = listed(news, self._choices) if self._choices else news
