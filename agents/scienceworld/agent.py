"""The agent that plays ScienceWorld."""

import os
from collections.abc import Callable, Sequence

from ..text_game.agent import Model, Server, TextAgent, connect, play_chat, prefix_of
from ..text_game.game import Outcome
from ..text_game.java import java_executable
from .environment import Environment
from .game import Game
from .tasks import Episode


class ScienceWorldAgent(TextAgent[Episode]):
    """Play one episode of ScienceWorld; the variables are those of `tasks.ENV_MAP`."""

    episode = Episode

    @staticmethod
    def check() -> str:
        """Return one line for a launcher to show before the first rollout. Raises FileNotFoundError without Java."""
        return f"ScienceWorld with Java at {java_executable()}"

    def play(self, episode: Episode, server: Server) -> Outcome:
        return play(episode, connect(server), prefix=prefix_of(os.environ))


def play(
    episode: Episode, model: Model, show: Callable[[str], object] = lambda text: None, prefix: Sequence[str] = ()
) -> Outcome:
    """Play one episode in a Java process of its own, as `play_chat` does."""
    with Environment() as environment:
        game = Game(environment, episode)
        game.replay(prefix)
        return play_chat(game, model, show)
