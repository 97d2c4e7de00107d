"""The agent that plays Colossal Cave (`uv pip install adventure==1.7`)."""

from ..text_game.agent import Server, TextAgent, play_game
from ..text_game.game import Outcome, TextGame
from .environment import Environment
from .tasks import Episode

SYSTEM = (
    "You play a text adventure. Each turn you are told what happened. Reply with a command of one or two words, such "
    "as enter building, take lamp, north, inventory; nothing else."
)


class ColossalCaveAgent(TextAgent[Episode]):
    """Play one game in the cave; the variables are those of `Episode.env_map()`."""

    episode = Episode

    @staticmethod
    def check() -> str:
        """Return one line for a launcher to show. Raises ModuleNotFoundError without the package `adventure`."""
        Environment(0, 1)
        return "Colossal Cave"

    def play(self, episode: Episode, server: Server) -> Outcome:
        environment = Environment(episode.seed, episode.max_steps)
        game = TextGame(environment, episode, SYSTEM, environment.state)
        return play_game(game, server)
