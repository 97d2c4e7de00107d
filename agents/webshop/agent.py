"""The agent that shops in WebShop.

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/webshop/train.yaml
"""

from contextlib import closing
from pathlib import Path

from ..text_game.agent import Server, TextAgent, connect, play_chat
from ..text_game.game import Outcome
from .catalogue import Catalogue
from .environment import Environment
from .game import Game
from .tasks import Episode


class WebShopAgent(TextAgent[Episode]):
    """One episode of WebShop; the variables are those of `Episode.env_map()`."""

    episode = Episode

    def play(self, episode: Episode, server: Server) -> Outcome:
        with closing(Catalogue(Path(episode.catalogue))) as catalogue:
            return play_chat(Game(Environment(catalogue, episode.hits), episode), connect(server))
