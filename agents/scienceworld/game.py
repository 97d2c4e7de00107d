"""One episode as text: what the policy is shown, and what its reply does."""

from dataclasses import dataclass

from . import prompts
from .environment import Environment
from .tasks import Episode

FULL_SCORE = 100


@dataclass(frozen=True)
class Outcome:
    """How an episode ended: ScienceWorld's score, -100..100, and one line saying where it came from."""

    score: int
    message: str

    @property
    def success(self) -> bool:
        return self.score == FULL_SCORE


class Game:
    """One episode, begun: show `system`, then `turn` and `act` on the reply, until it is `done`.

    system: the rules, for the system message.
    turn: what the policy is to be shown next; the last observation when the episode is done.

    Raises ValueError for a variation that does not exist.
    """

    def __init__(self, environment: Environment, episode: Episode) -> None:
        self._environment, self.episode = environment, episode
        self._state = environment.reset(episode.task, episode.variation, episode.simplification, episode.max_steps)
        self._steps = 0
        self.system = prompts.system(episode, environment.action_templates())
        self._show(prompts.opening(environment.task_description, self._state.observation))

    @property
    def done(self) -> bool:
        return self._state.done or self._steps == self.episode.max_steps

    def act(self, reply: str) -> None:
        """Take the action that a reply names. A reply that names none is a step too; one after the end is ignored."""
        if self.done:
            return
        action = prompts.chosen(reply, self._choices) if self._choices else prompts.typed(reply)
        self._steps += 1
        if action is not None:
            self._state = self._environment.step(action)
        self._show(prompts.NOT_LISTED if action is None else self._state.observation)

    def outcome(self, remark: str = "") -> Outcome:
        """The score so far."""
        where = f"{self.episode.task} variation {self.episode.variation}"
        steps = f"{self._steps} of {self.episode.max_steps} steps"
        return Outcome(self._state.score, f"{where}: score {self._state.score} after {steps}{remark}")

    def _show(self, news: str) -> None:
        listed = self.episode.actions == "choice" and not self.done
        self._choices = prompts.draw(self._state.valid_actions, self.episode, self._steps) if listed else []
        self.turn = prompts.listed(news, self._choices) if self._choices else news
