"""CoinCollector of TextWorld-Express with its observations shortened to what the task needs."""

from ..houses.environment import FOLD, HouseEnvironment, walk_house
from ..houses.house import House
from ..text_game.game import State
from ..textworld_express.environment import Environment

GAME = "coin"
TASK = "Find the coin and take it."


class CoinEnvironment(HouseEnvironment):
    """CoinCollector without doors to open and without other things."""

    task_description = TASK

    def reset(self, rooms: int, seed: int, max_steps: int) -> State:
        """Begin an episode in the house of this seed. Raises ValueError where no house has so many rooms."""
        return self._short(self._world.reset(GAME, _params(rooms), FOLD, seed, max_steps))


def walk(world: Environment, rooms: int, seed: int) -> House:
    """Return the house of this seed, found by walking through every door."""
    return walk_house(world, GAME, _params(rooms), seed)


def _params(rooms: int) -> str:
    return f"numLocations={rooms},numDistractorItems=0,includeDoors=0"
