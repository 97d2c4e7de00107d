"""Actions as text: how they are listed for a policy, and how its reply is read."""

import difflib
import random
import re
from collections.abc import Sequence

from .episode import TextEpisode


def listed(observation: str, choices: Sequence[str]) -> str:
    """Return a turn of the choice form: the observation and the numbered actions."""
    return "\n".join([observation, "", *(f"{number} {action}" for number, action in enumerate(choices, start=1))])


def draw(valid_actions: Sequence[str], episode: TextEpisode, step: int) -> list[str]:
    """Return at most `episode.choices` of the valid actions, in random order.

    Seeded by the episode and the step: rollouts that acted alike are offered the same actions.
    """
    generator = random.Random(f"{episode.seed} {episode.world} {step}")
    return generator.sample(valid_actions, min(episode.choices, len(valid_actions)))


def chosen(reply: str, choices: Sequence[str]) -> str | None:
    """Return the action that the first number of a reply names, None if it names no listed number."""
    number = re.search(r"[0-9]+", reply)
    by_number = {str(number): action for number, action in enumerate(choices, start=1)}
    return by_number.get(number.group().lstrip("0")) if number else None


def typed(reply: str) -> str:
    """Return the action of a free-text reply: its first line, whatever it says."""
    return reply.strip().partition("\n")[0].strip()


def nearest(text: str, valid_actions: Sequence[str]) -> str:
    """Return the valid action nearest to `text`: `text` itself if it is valid, else the one with most words in common.

    Nearness is the Jaccard index of the sets of words, regardless of case: common words over words in either. Ties go
    to the action whose words come in the most similar order, then to the first in alphabetical order; so does a text
    that shares no word with any action.

    Raises ValueError if there is no valid action.
    """
    if text in valid_actions:
        return text
    order = text.lower().split()
    words = set(order)

    def jaccard(action: str) -> float:
        others = set(action.lower().split())
        common = len(words & others)
        return common / (len(words) + len(others) - common)

    indices = [jaccard(action) for action in valid_actions]
    best = max(indices)
    ties = [action for action, index in zip(valid_actions, indices, strict=True) if index == best]
    if best == 0:
        return min(ties)
    similarity = difflib.SequenceMatcher(b=order, autojunk=False)

    def by_order(action: str) -> tuple[float, str]:
        similarity.set_seq1(action.lower().split())
        return -similarity.ratio(), action

    return min(ties, key=by_order)
