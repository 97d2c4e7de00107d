"""An episode of ScienceWorld as turns."""

from collections.abc import Sequence

from ..text_game.game import TextGame
from .environment import Environment
from .tasks import Episode

ROLE = "You act in a small text world of rooms, things and living things, to carry out a task."

FREE_TEXT = """\
Each turn you are shown what happened. Reply with your next action: one line, nothing else.
Actions, with OBJ the name of a thing or place: {templates}.
`focus on OBJ` names OBJ as your answer; focusing on a wrong thing fails the task."""

CHOICE = """\
Each turn you are shown what happened and a numbered list of actions. Reply with one number from the list, nothing else.
`focus on` names a thing as your answer; focusing on a wrong thing fails the task."""


class Game(TextGame):
    """One episode, begun. Raises ValueError for a variation that does not exist."""

    def __init__(self, environment: Environment, episode: Episode) -> None:
        state = environment.reset(episode.task, episode.variation, episode.simplification, episode.max_steps)
        super().__init__(environment, episode, system(episode, environment.action_templates()), state)


def system(episode: Episode, templates: Sequence[str]) -> str:
    """The system message; `templates` are the forms of the actions that the episode allows."""
    rules = CHOICE if episode.actions == "choice" else FREE_TEXT.format(templates=", ".join(templates))
    return f"{ROLE}\n{rules}"
