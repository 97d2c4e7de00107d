"""The words of the chat, and how a reply is read.

The whole chat is sent at every turn and never rewritten, so each turn is kept short.
"""

import random
import re
from collections.abc import Sequence

from .tasks import Episode

ROLE = "You act in a small text world of rooms, things and living things, to carry out a task."

FREE_TEXT = """\
Each turn you are shown what happened. Reply with your next action: one line, nothing else.
Actions, with OBJ the name of a thing or place: {templates}.
`focus on OBJ` names OBJ as your answer; focusing on a wrong thing fails the task."""

CHOICE = """\
Each turn you are shown what happened and a numbered list of actions. Reply with one number from the list, nothing else.
`focus on` names a thing as your answer; focusing on a wrong thing fails the task."""

NOT_LISTED = "Nothing was done: your reply named no listed number."


def system(episode: Episode, templates: Sequence[str]) -> str:
    """The system message; `templates` are the forms of the actions that the episode allows."""
    rules = CHOICE if episode.actions == "choice" else FREE_TEXT.format(templates=", ".join(templates))
    return f"{ROLE}\n{rules}"


def opening(task_description: str, observation: str) -> str:
    """What the first turn shows: the task and the place."""
    return f"{task_description}\n\n{observation}"


def listed(observation: str, choices: Sequence[str]) -> str:
    """A turn of the choice form: the observation and the numbered actions."""
    return "\n".join([observation, "", *(f"{number} {action}" for number, action in enumerate(choices, start=1))])


def draw(valid_actions: Sequence[str], episode: Episode, step: int) -> list[str]:
    """At most `episode.choices` of the valid actions, in random order.

    Seeded by the episode and the step: rollouts that acted alike are offered alike.
    """
    generator = random.Random(f"{episode.seed} {episode.task} {episode.variation} {step}")
    return generator.sample(valid_actions, min(episode.choices, len(valid_actions)))


def typed(reply: str) -> str:
    """The action of a free-text reply: its first line, whatever it says."""
    return reply.strip().partition("\n")[0].strip()


def chosen(reply: str, choices: Sequence[str]) -> str | None:
    """The action whose number is the first in the reply; None where the reply names no listed number."""
    number = re.search(r"[0-9]+", reply)
    by_number = {str(number): action for number, action in enumerate(choices, start=1)}
    return by_number.get(number.group().lstrip("0")) if number else None
