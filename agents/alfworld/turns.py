"""An episode of ALFWorld as turns, in two forms of the chat.

- The whole chat: each turn is an observation, and the admissible actions if they are shown.
- The last turns, as in verl-agent: the system message is written anew for each turn and holds the task, the last
  observations and actions, and the admissible actions; the turn is the observation alone, which is GiGPO's anchor.
"""

from collections.abc import Sequence

from ..text_game.actions import META
from ..text_game.game import TextGame
from .environment import Environment
from .tasks import Episode

ROLE = "You act in a house by commands, to carry out a task. The episode ends when it is done."

CARRY = "You carry one thing at a time, and see what lies in a place when you have gone there, or opened it."
COMMANDS = """\
Commands, with R a place or container such as drawer 2, and T a thing such as mug 1:
go to R, open R, close R, take T from R, move T to R, use T (a lamp), clean T with R, heat T with R, cool T with R, \
slice T with T, examine R, look, inventory."""

TOLD = "Each turn you are told what happened."
REPLY = {
    "free-text": f"{TOLD} Reply with your next command: one line, nothing else.",
    "choice": f"{TOLD[:-1]} and a numbered list of commands. Reply with one number from the list, nothing else.",
    "tags": f"{TOLD} First think between <think> and </think>, then give your command between <action> and </action>.",
    "meta": f"{TOLD} {META}",
}

ADMISSIBLE = "Possible commands:"


class Game(TextGame):
    """One started episode. `system` belongs to the turn that is shown."""

    def __init__(self, environment: Environment, episode: Episode) -> None:
        self._history = episode.history
        self._lists = episode.admissible == "shown" and episode.actions != "choice"
        written = [] if episode.actions == "choice" else [COMMANDS]
        self._rules = "\n".join([ROLE, CARRY, *written, REPLY[episode.actions]])
        self._task = environment.task_description
        self._past: list[str] = []  # observations, each followed by the action
        super().__init__(environment, episode, self._rules, environment.state)

    def replay(self, actions: Sequence[str]) -> None:
        if actions:
            self._past.clear()
        super().replay(actions)

    def _action(self, reply: str) -> str | None:
        action = super()._action(reply)
        self._past.append(f"> {action or 'nothing'}")
        return action

    def _show(self, news: str) -> None:
        super()._show(news)
        listed = [f"{ADMISSIBLE} {', '.join(self._state.valid_actions)}"] if self._lists and not self.done else []
        if not self._history:
            self.turn = "\n\n".join([self.turn, *listed])
        else:
            self.system = "\n\n".join([self._rules, *self._told(), *listed])
        self._past.append(news if self._past else self._state.observation)

    def _told(self) -> list[str]:
        """Return the task and the last steps; nothing in the first turn, which states the task."""
        if not self._past:
            return []
        last = "\n".join(self._past[-2 * self._history :])
        return [self._task, f"Steps taken: {len(self._past) // 2}. The last of them:\n{last}"]
