"""An episode of TextWorld-Express as turns."""

from ..text_game.game import TextGame
from .environment import Environment
from .tasks import GAMES, Episode

ROLE = "You act in a small text world of rooms and things, to carry out a task."

FREE_TEXT = """\
Each turn you are shown what happened. Reply with your next action: one line, nothing else.
Actions, with OBJ the name of a thing and DIRECTION one of north, south, east, west: {templates}."""

CHOICE = (
    "Each turn you are shown what happened and a numbered list of actions. "
    "Reply with one number from the list, nothing else."
)


class Game(TextGame):
    """One episode, begun. Raises ValueError for parameters that the game does not have."""

    def __init__(self, environment: Environment, episode: Episode) -> None:
        state = environment.reset(episode.game, episode.params, episode.fold, episode.seed, episode.max_steps)
        rules = CHOICE if episode.actions == "choice" else FREE_TEXT.format(templates=", ".join(GAMES[episode.game]))
        super().__init__(environment, episode, f"{ROLE}\n{rules}", state)
