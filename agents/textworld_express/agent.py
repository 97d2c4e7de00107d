"""The agent that plays TextWorld-Express.

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/textworld_express/train.yaml
"""

from ..text_game.agent import Server, TextAgent, connect, play_chat
from ..text_game.game import Outcome
from ..text_game.java import java_executable
from .environment import Environment
from .game import Game
from .tasks import Episode


class TextWorldExpressAgent(TextAgent[Episode]):
    """One episode of TextWorld-Express; the variables are those of `Episode.env_map()`."""

    episode = Episode

    @staticmethod
    def check() -> str:
        """What a launcher may show before the first rollout. Raises FileNotFoundError without Java."""
        return f"TextWorld-Express with Java at {java_executable()}"

    def play(self, episode: Episode, server: Server) -> Outcome:
        with Environment() as environment:
            return play_chat(Game(environment, episode), connect(server))
