"""An agent of bench/async_rollouts.py: CoinCollector's, in a world that takes seconds for each turn."""

import os
import random
import time

from empo2.agents.houses.agent import SYSTEM, CoinCollectorAgent
from empo2.agents.houses.environment import HouseEnvironment
from empo2.agents.houses.tasks import HouseEpisode
from empo2.agents.text_game.agent import Server, connect, play_chat
from empo2.agents.text_game.game import Outcome, State, TextGame

SHAPE, LEAST_SECONDS, MOST_SECONDS = 1.2, 0.4, 10.0


def turn_seconds(rollout: str) -> float:
    """Return the seconds of each turn of an episode: drawn from a Pareto distribution, cut off at its end."""
    return min(MOST_SECONDS, LEAST_SECONDS * random.Random(rollout).paretovariate(SHAPE))


class SlowHouse(HouseEnvironment):
    def step(self, action: str) -> State:
        time.sleep(turn_seconds(os.environ["AGL_EVENT_URL"].partition("/attempt/")[0]))
        return super().step(action)


class SlowAgent(CoinCollectorAgent):
    def play(self, episode: HouseEpisode, server: Server) -> Outcome:
        house = episode.game.house(episode.level, episode.seed, episode.disguise)
        environment = SlowHouse(episode.game, house, episode.max_steps)
        return play_chat(TextGame(environment, episode, SYSTEM, environment.state), connect(server))
