"""An episode in a house: what `textworld_express` plays, in few words and without Java.

MapReader names the coin's room and has a map, which says which rooms adjoin: with both there is little to explore, so
neither is shown. Its box is in the first room. When the player enters it with the coin, the coin is put into the box
without a step of the player's.
"""

from ..text_game.game import FULL_SCORE, State
from .games import Game
from .house import DIRECTIONS, TAKE, House, carrying, refused, room_text

CARRIED = 50  # MapReader's score with the coin in hand; CoinCollector ends with the coin
LOOK = "look around"


class HouseEnvironment:
    """A started episode of a game in a house; an action that the house does not know does nothing."""

    def __init__(self, game: Game, house: House, max_steps: int) -> None:
        self.task_description = game.task.format(start=house.start)
        self._game, self._house, self._steps_left = game, house, max_steps
        self._room = house.start
        self._score = 0

    @property
    def state(self) -> State:
        """Return what the player sees before the next action."""
        return self._state(self._here)

    def step(self, action: str) -> State:
        """Act. Raises RuntimeError after the episode's last step."""
        if not self._steps_left:
            raise RuntimeError("the episode has no steps left")
        self._steps_left -= 1
        action = action.strip()
        verb, _, direction = action.partition(" ")
        exits = self._house.doors[self._room]
        if verb == "move" and direction in exits:
            self._room = exits[direction]
            if self._score and self._room == self._house.start:
                self._score = FULL_SCORE
        elif action == TAKE and self._sees_coin:
            self._score = CARRIED if self._game.brought_back else FULL_SCORE
        elif action != LOOK:
            return self._state(refused(self._here))
        return self._state(self._here)

    @property
    def _sees_coin(self) -> bool:
        return self._room == self._house.coin and not self._score

    @property
    def _here(self) -> str:
        here = room_text(self._room, self._house.doors[self._room], self._sees_coin)
        return carrying(self._house.start, here) if self._score == CARRIED else here

    def _state(self, observation: str) -> State:
        exits = self._house.doors[self._room]
        actions = [f"move {direction}" for direction in DIRECTIONS if direction in exits] + [TAKE] * self._sees_coin
        done = self._score == FULL_SCORE or not self._steps_left
        return State(observation, self._score, done, tuple(sorted(actions)))
