"""An episode of ScienceWorld as turns, in four action forms: free text, choice, the EMPO2 authors' protocol, RLVMR's.

docs/scienceworld.md compares the third one, `paper`, with the authors' code.
"""

import re
from collections.abc import Sequence

from ..text_game.actions import META
from ..text_game.game import TextGame
from .environment import Environment
from .examples import examples
from .tasks import Episode

ROLE = "You act in a small text world of rooms, things and living things, to carry out a task."

FREE_TEXT = """\
Each turn you are shown what happened. {reply}
Actions, with OBJ the name of a thing or place: {templates}.
`focus on OBJ` names OBJ as your answer; focusing on a wrong thing fails the task."""

CHOICE = """\
Each turn you are shown what happened and a numbered list of actions. Reply with one number from the list, nothing else.
`focus on` names a thing as your answer; focusing on a wrong thing fails the task."""

PAPER = """\
Each turn you are shown what happened and, whenever it changes, what you carry. Reply with your next action: one line, \
nothing else. These are the main actions, with OBJ the name of a thing:
open OBJ: a door or a container
go to PLACE: a room next to this one
focus on OBJ: name OBJ as a thing that the task asks for; focusing on a wrong thing fails the task
move OBJ to OBJ: put a thing into or onto another
connect OBJ to OBJ: join wires and electrical parts
pour OBJ into OBJ: empty one container into another
mix OBJ: let what is in a container react
pick up OBJ: carry a thing with you
The examples below use further ones. Explore: what you need may be in another room, or in something that is closed. If \
an action changes nothing, try a different one.

{examples}"""

# Things that a task's description names to focus on or to put something into, without its words for kinds of things.
NAMED = re.compile(
    r"the (\w+ box)\b"
    r"|focus on (?:the|a) (?!thing\b|substance\b|animal\b|inclined\b|intermediate\b|life\b|\d)([\w -]+)"
    r"|(?:boil|melt|freeze|matter of|stages of the) ([\w -]+)"
)


class Game(TextGame):
    """One started episode. Raises ValueError for a variation that does not exist."""

    def __init__(self, environment: Environment, episode: Episode) -> None:
        state = environment.reset(episode.task, episode.variation, episode.simplification, episode.max_steps)
        self._world = environment
        self._carried: tuple[str, ...] | None = None  # as last shown
        super().__init__(environment, episode, f"{ROLE}\n{_rules(environment, episode)}", state)

    def replay(self, actions: Sequence[str]) -> None:
        if actions:
            self._carried = None  # the first turn, which comes after them, shows it
        super().replay(actions)

    def _show(self, news: str) -> None:
        super()._show(news)
        if self.episode.actions != "paper" or self.done:
            return
        if self._carried is None and (names := named(self._world.task_description)):
            self.turn += f"\nThings to focus on may be {', '.join(names)}, or what you carry."
        if self._carried != self._world.inventory:
            self._carried = self._world.inventory
            self.turn += f"\nYou carry: {', '.join(self._carried) or 'nothing'}."


def named(description: str) -> list[str]:
    """Return the things named in a task's description, in order, each once."""
    groups = (next(filter(None, match.groups())) for match in NAMED.finditer(description))
    return list(dict.fromkeys(groups))


def _rules(environment: Environment, episode: Episode) -> str:
    match episode.actions:
        case "choice":
            return CHOICE
        case "free-text" | "meta" as form:
            reply = META if form == "meta" else "Reply with your next action: one line, nothing else."
            return FREE_TEXT.format(reply=reply, templates=", ".join(environment.action_templates()))
        case _:  # paper
            shown = enumerate(examples(episode.task, episode.variation), start=1)
            return PAPER.format(examples="\n\n".join(f"Example {number}. {example}" for number, example in shown))
