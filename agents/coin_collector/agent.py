"""The agent that plays CoinCollector.

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/coin_collector/train.yaml
"""

from ..houses.agent import HouseAgent
from ..text_game.game import State, TextEnvironment
from ..textworld_express.environment import Environment
from .environment import CoinEnvironment
from .levels import LEVELS
from .tasks import Episode


class CoinCollectorAgent(HouseAgent[Episode]):
    """One episode of CoinCollector."""

    episode = Episode
    name = "CoinCollector"

    def begin(self, world: Environment, episode: Episode) -> tuple[TextEnvironment, State]:
        environment = CoinEnvironment(world)
        return environment, environment.reset(LEVELS[episode.level].rooms, episode.seed, episode.max_steps)
