"""The agent that plays TextWorld-Express.

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/textworld_express/train.yaml
"""

from ..text_game.agent import Server, TextAgent, play_game
from ..text_game.game import Outcome, TextGame
from ..text_game.java import java_executable
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


class TextWorldExpressAgent(TextAgent[Episode]):
    """Play one episode of TextWorld-Express; the variables are those of `Episode.env_map()`."""

    episode = Episode

    @staticmethod
    def check() -> str:
        """Return one line for a launcher to show before the first rollout. Raises FileNotFoundError without Java."""
        return f"TextWorld-Express with Java at {java_executable()}"

    def play(self, episode: Episode, server: Server) -> Outcome:
        with Environment() as environment:
            return play_game(begin(environment, episode), server)


def begin(environment: Environment, episode: Episode) -> TextGame:
    """Start an episode as turns. Raises ValueError for parameters that the game does not have."""
    state = environment.reset(episode.game, episode.params, episode.fold, episode.seed, episode.max_steps)
    rules = CHOICE if episode.actions == "choice" else FREE_TEXT.format(templates=", ".join(GAMES[episode.game]))
    return TextGame(environment, episode, f"{ROLE}\n{rules}", state)
