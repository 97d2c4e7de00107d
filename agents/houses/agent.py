"""The agents that play the games in houses.

To train one (settings in coin.yaml and mapreader.yaml):

    empo2 train --profile cpu --config agents/houses/coin.yaml
"""

from typing import ClassVar

from ..text_game.agent import Server, TextAgent, play_game
from ..text_game.game import Outcome, TextGame
from .environment import HouseEnvironment
from .tasks import CoinCollectorEpisode, HouseEpisode, MapReaderEpisode

SYSTEM = "Reply with one action: move north, move east, move south, move west or take coin."


class HouseAgent(TextAgent[HouseEpisode]):
    """Play one episode in a house; the variables are those of the episode's `env_map()`."""

    environment: ClassVar = HouseEnvironment

    @classmethod
    def check(cls) -> str:
        """Return one line for a launcher to show before the first rollout."""
        return f"{cls.episode.game.title} in houses of TextWorld-Express"

    def play(self, episode: HouseEpisode, server: Server) -> Outcome:
        house = episode.game.house(episode.level, episode.seed, episode.disguise)
        environment = self.environment(episode.game, house, episode.max_steps)
        game = TextGame(environment, episode, SYSTEM, environment.state)
        return play_game(game, server)


class CoinCollectorAgent(HouseAgent):
    episode = CoinCollectorEpisode


class MapReaderAgent(HouseAgent):
    episode = MapReaderEpisode
