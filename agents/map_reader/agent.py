"""The agent that plays MapReader.

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/map_reader/train.yaml
"""

from ..houses.agent import HouseAgent
from ..text_game.game import State, TextEnvironment
from ..textworld_express.environment import Environment
from .environment import MapReaderEnvironment
from .levels import LEVELS
from .tasks import Episode


class MapReaderAgent(HouseAgent[Episode]):
    """One episode of MapReader."""

    episode = Episode
    name = "MapReader"

    def begin(self, world: Environment, episode: Episode) -> tuple[TextEnvironment, State]:
        level, environment = LEVELS[episode.level], MapReaderEnvironment(world)
        return environment, environment.reset(level.rooms, max(level.distances), episode.seed, episode.max_steps)
