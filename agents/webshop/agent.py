"""The agent that shops in WebShop.

To train it (settings in train.yaml):

    empo2 train --profile cpu --config agents/webshop/train.yaml
"""

from contextlib import closing

from ..text_game.agent import Server, TextAgent, play_game
from ..text_game.game import Outcome, TextGame
from .environment import Environment
from .tasks import Episode, open_catalogue

ROLE = "You are a customer of a shop: find a product that is all that the instruction asks for, and buy it."

FREE_TEXT = """\
Each turn you are shown a page, its parts separated by [SEP]. Reply with your next action: one line, nothing else.
search[WORDS] finds products, on any page; click[TEXT] presses a button, a product's code or an option of the page.
Choose the options that are asked for before click[buy now], which ends the visit.
The form of an action is that of search[green wool scarf] and click[next >]."""

CHOICE = """\
Each turn you are shown a page, its parts separated by [SEP], and a numbered list of actions.
Reply with one number from the list, nothing else.
Choose the options that are asked for before click[buy now], which ends the visit."""


class Game(TextGame):
    """One started episode of WebShop as turns. Raises KeyError for a goal that the catalogue does not have."""

    def __init__(self, environment: Environment, episode: Episode) -> None:
        state = environment.reset(episode.goal, episode.max_steps)
        rules = CHOICE if episode.actions == "choice" else FREE_TEXT
        super().__init__(environment, episode, f"{ROLE}\n{rules}", state)


class WebShopAgent(TextAgent[Episode]):
    """Play one episode of WebShop; the variables are those of `Episode.env_map()`."""

    episode = Episode

    def play(self, episode: Episode, server: Server) -> Outcome:
        with closing(open_catalogue(episode.catalogue)) as catalogue:
            environment = Environment(catalogue, episode.hits, episode.option_matching)
            return play_game(Game(environment, episode), server)
