"""An agent of bench/async_rollouts.py: CoinCollector's, in a world that takes seconds for each turn."""

import os
import random
import time

from empo2.agents.houses.agent import CoinCollectorAgent
from empo2.agents.houses.environment import HouseEnvironment
from empo2.agents.text_game.game import State

SHAPE, LEAST_SECONDS, MOST_SECONDS = 1.2, 0.4, 10.0


def turn_seconds(rollout: str) -> float:
    """Return the seconds of each turn of an episode: drawn from a Pareto distribution, cut off at its end."""
    return min(MOST_SECONDS, LEAST_SECONDS * random.Random(rollout).paretovariate(SHAPE))


class SlowHouse(HouseEnvironment):
    def step(self, action: str) -> State:
        time.sleep(turn_seconds(os.environ["AGL_EVENT_URL"].partition("/attempt/")[0]))
        return super().step(action)


class SlowAgent(CoinCollectorAgent):
    environment = SlowHouse
