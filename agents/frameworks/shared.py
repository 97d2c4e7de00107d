"""The base class of the agents of all frameworks: a task, an environment and a reward."""

import os
from abc import abstractmethod

from empo2.agents.scienceworld.agent import ScienceWorldAgent
from empo2.agents.scienceworld.environment import Environment
from empo2.agents.scienceworld.game import Game
from empo2.agents.scienceworld.tasks import Episode
from empo2.agents.text_game.agent import OUTGROWN, Server, is_too_long, prefix_of
from empo2.agents.text_game.game import Outcome

TOOL_CALL_TOKENS = 32  # of a call beyond its action: brackets, and the names of tool and argument


class FrameworkAgent(ScienceWorldAgent):
    """Play one episode with a framework. A chat that outgrows the model's context ends it with the score so far."""

    def play(self, episode: Episode, server: Server) -> Outcome:
        with Environment() as environment:
            game = Game(environment, episode)
            game.replay(prefix_of(os.environ))
            try:
                self.converse(game, server)
            except Exception as error:  # each framework raises its own error for it
                if not is_too_long(error):
                    raise
                return game.outcome(OUTGROWN)
            return game.outcome()

    @abstractmethod
    def converse(self, game: Game, server: Server) -> None:
        """Play until `game.done`, or until the framework gives up."""
