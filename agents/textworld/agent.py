"""The agent that plays TextWorld's own games (`uv pip install textworld==1.7.0`).

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/textworld/train.yaml
"""

from importlib.util import find_spec

from ..text_game.agent import Server, TextAgent, play_game
from ..text_game.game import Outcome, TextGame
from .environment import Environment, game_file
from .tasks import Episode

ROLE = "You act in a small text world of rooms and things, to carry out a task. Doors and chests may need keys."
COMMANDS = (
    "Commands: go DIRECTION, open THING, close THING, take THING, take THING from THING, drop THING, "
    "put THING on THING, insert THING into THING, unlock THING with KEY, lock THING with KEY, eat THING, look, "
    "inventory, examine THING."
)
REPLY = {
    "free-text": f"Reply with your next command: one line, nothing else.\n{COMMANDS}",
    "choice": "With it comes a numbered list of commands. Reply with one number from the list, nothing else.",
}


class TextWorldAgent(TextAgent[Episode]):
    """Play one game; the variables are those of `Episode.env_map()`."""

    episode = Episode

    @staticmethod
    def check() -> str:
        """Return one line for a launcher to show. Raises ModuleNotFoundError without the package `textworld`."""
        if find_spec("textworld") is None:
            raise ModuleNotFoundError("needs the package textworld: uv pip install textworld==1.7.0")
        return "TextWorld's own games"

    def play(self, episode: Episode, server: Server) -> Outcome:
        file = game_file(episode.rooms, episode.objects, episode.quest, episode.seed)
        environment = Environment(file, episode.max_steps)
        system = f"{ROLE}\nEach turn you are told what happened. {REPLY[episode.actions]}"
        game = TextGame(environment, episode, system, environment.state)
        return play_game(game, server)
