"""An episode of ALFWorld: the engine's replies as states."""

from ..text_game.game import State
from .engine import Engine
from .games import Game


class Environment:
    """A started episode of a game. Equal actions give equal trajectories.

    The score is `reward` once the game is won, else 0. `help`, which any episode may ask for, is not among the valid
    actions, as in verl-agent.

    Args:
        game: what is played.
        wording: whose words the goal is told in: 0 the game's own, 1 and up people's.

    Raises:
        ValueError: the game has no such wording.
    """

    def __init__(self, game: Game, wording: int, reward: int) -> None:
        if not 0 <= wording <= len(game.wordings):
            raise ValueError(f"wording {wording}: the game has 0 to {len(game.wordings)}")
        self._engine, self._reward = Engine(game), reward
        said = game.wordings[wording - 1] if wording else ""
        self.task_description = f"Your task is to: {said}" if said else game.instruction

    @property
    def state(self) -> State:
        """Return what the player sees before the first action: the room, without the welcome and the task."""
        return self._state(self._engine.intro.split("\n\n")[1])

    def step(self, action: str) -> State:
        return self._state(self._engine.step(action))

    def _state(self, observation: str) -> State:
        won = self._engine.won
        actions = tuple(action for action in self._engine.commands if action != "help")
        return State(observation.strip(), self._reward if won else 0, won, actions)
