"""The agent that plays ALFWorld.

To train it (settings in train.yaml, verl-agent's in verl-agent.yaml):

    empo2 train --profile cpu --config agents/alfworld/train.yaml
"""

import os
from collections.abc import Sequence

from ..text_game.agent import Message, Model, Server, TextAgent, connect, play_chat, prefix_of
from ..text_game.game import Outcome
from .environment import Environment
from .tasks import Episode, game_of
from .turns import Game


class ALFWorldAgent(TextAgent[Episode]):
    """Play one episode of ALFWorld; the variables are those of `Episode.env_map()`."""

    episode = Episode

    def play(self, episode: Episode, server: Server) -> Outcome:
        return play(episode, connect(server), prefix_of(os.environ))


def play(episode: Episode, model: Model, prefix: Sequence[str] = ()) -> Outcome:
    """Play one episode as `play_chat` does; the score is the episode's reward if the game is won, else 0."""
    game = Game(Environment(game_of(episode), episode.wording, episode.reward), episode)

    def newest(messages: list[Message]) -> str:
        return model([{"role": "system", "content": game.system}, messages[-1]])

    game.replay(prefix)
    return play_chat(game, newest if episode.history else model)
