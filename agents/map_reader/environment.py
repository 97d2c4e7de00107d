"""MapReader of TextWorld-Express with its observations shortened, and without what would save the search.

The game names the coin's room and has a map, which says which rooms adjoin: with both there is little to explore, so
neither is shown.
"""

from dataclasses import replace

from ..houses.environment import FOLD, HouseEnvironment, read_room, walk_house
from ..houses.house import TAKE, House
from ..text_game.game import State
from ..textworld_express.environment import Environment

GAME = "mapreader"
TAKEN = 50  # the score with the coin in hand
PUT = "put coin in box"


class MapReaderEnvironment(HouseEnvironment):
    """MapReader without map, doors to open and other things; the box is in the first room.

    When the player enters the box's room with the coin, the coin is put into the box without a step of the player's.
    """

    def __init__(self, world: Environment) -> None:
        super().__init__(world)
        self.task_description = ""
        self._box = ""
        self._carried = False

    def reset(self, rooms: int, distance: int, seed: int, max_steps: int) -> State:
        """Begin an episode in the house of this seed, whose coin is at most `distance` moves away.

        Raises ValueError where no house has so many rooms, or this one no coin so far away.
        """
        self._carried = False
        # Two steps are the game's alone: to look around after taking the coin, and to put it into the box.
        state = self._short(self._world.reset(GAME, _params(rooms, distance), FOLD, seed, max_steps + 2))
        self._box, _, _ = self._room
        self.task_description = task(self._box)
        return state

    def step(self, action: str) -> State:
        state = self._world.step(action)
        taken = state.score == TAKEN
        if taken and not self._carried:
            state = self._world.step("look around")  # the game's reply shows no room
        elif taken and (read := read_room(state.observation)) and read[0] == self._box:
            state = self._world.step(PUT)
        self._carried = taken
        return self._short(state)

    def _here(self) -> str:
        return carrying(self._box, super()._here()) if self._carried else super()._here()

    def _short(self, state: State) -> State:
        """Shorten a state, and leave out the actions that this form of the game has not."""
        actions = tuple(action for action in state.valid_actions if action == TAKE or action.startswith("move "))
        return super()._short(replace(state, valid_actions=actions))


def task(box: str) -> str:
    return f"Find the coin, take it and bring it to the {box}."


def carrying(box: str, here: str) -> str:
    """Return what the player reads with the coin in hand; `here` is the room's text."""
    return f"Bring it to the {box}. {here}"


def walk(world: Environment, rooms: int, distance: int, seed: int) -> House:
    """Return the house of this seed, found by walking through every door; the box is at its start.

    Raises ValueError where this house has no rooms so far apart.
    """
    return walk_house(world, GAME, _params(rooms, distance), seed)


def _params(rooms: int, distance: int) -> str:
    return f"numLocations={rooms},maxDistanceApart={distance},maxDistractorItemsPerLocation=0,includeDoors=0"
