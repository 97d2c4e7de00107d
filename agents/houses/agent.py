"""The agent that plays a game in a house."""

from typing import ClassVar

from ..text_game.agent import Server, TextAgent, connect, play_chat
from ..text_game.game import Outcome, State, TextEnvironment, TextGame
from ..text_game.java import java_executable
from ..textworld_express.environment import Environment
from .tasks import HouseEpisode

SYSTEM = "Reply with one action: move north, move east, move south, move west or take coin."


class HouseAgent[Episode: HouseEpisode](TextAgent[Episode]):
    """One episode in a house; the variables are those of the episode's `env_map()`."""

    name: ClassVar[str]  # of the game

    @classmethod
    def check(cls) -> str:
        """Return one line for a launcher to show before the first rollout. Raises FileNotFoundError without Java."""
        return f"{cls.name} of TextWorld-Express with Java at {java_executable()}"

    def play(self, episode: Episode, server: Server) -> Outcome:
        with Environment() as world:
            environment, state = self.begin(world, episode)
            return play_chat(TextGame(environment, episode, SYSTEM, state), connect(server))

    def begin(self, world: Environment, episode: Episode) -> tuple[TextEnvironment, State]:
        """Return the game with a started episode, and its first state."""
        raise NotImplementedError
