"""The agent that plays CoinCollector.

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/coin_collector/train.yaml
"""

from ..text_game.agent import Server, TextAgent, connect, play_chat
from ..text_game.game import Outcome, TextGame
from ..text_game.java import java_executable
from ..textworld_express.environment import Environment
from .environment import CoinEnvironment
from .levels import LEVELS
from .tasks import Episode

SYSTEM = "Reply with one action: move north, move east, move south, move west or take coin."


class Game(TextGame):
    """One episode, begun."""

    def __init__(self, world: Environment, episode: Episode) -> None:
        environment = CoinEnvironment(world)
        state = environment.reset(LEVELS[episode.level].rooms, episode.seed, episode.max_steps)
        super().__init__(environment, episode, SYSTEM, state)


class CoinCollectorAgent(TextAgent[Episode]):
    """One episode of CoinCollector; the variables are those of `Episode.env_map()`."""

    episode = Episode

    @staticmethod
    def check() -> str:
        """What a launcher may show before the first rollout. Raises FileNotFoundError without Java."""
        return f"CoinCollector of TextWorld-Express with Java at {java_executable()}"

    def play(self, episode: Episode, server: Server) -> Outcome:
        with Environment() as world:
            return play_chat(Game(world, episode), connect(server))
