"""Actions as text: list them for a policy, and read the action from its reply."""

import difflib
import random
import re
from collections.abc import Sequence

from .episode import TextEpisode

# As in RLVMR (arXiv 2507.22844).
META_THOUGHTS = ("planning", "explore", "reflection", "monitor")
META = """\
First think in one sentence, between one pair of these tags:
<planning> to list the steps of the whole task, at its beginning or where the plan was wrong
<explore> to look for other places, things or actions, where something is missing
<reflection> to say what went wrong and what to do instead, after actions that changed nothing
<monitor> to name the step of the plan that is due, where all goes well
Then give your action between <action> and </action>."""


def listed(observation: str, choices: Sequence[str]) -> str:
    """Return a turn in the choice form: the observation and the numbered actions."""
    return "\n".join([observation, "", *(f"{number} {action}" for number, action in enumerate(choices, start=1))])


def draw(valid_actions: Sequence[str], episode: TextEpisode, step: int) -> list[str]:
    """Return at most `episode.choices` of the valid actions, in random order.

    The draw is seeded by the episode and the step, so rollouts with equal actions so far are offered the same list.
    """
    generator = random.Random(f"{episode.seed} {episode.world} {step}")
    return generator.sample(valid_actions, min(episode.choices, len(valid_actions)))


def chosen(reply: str, choices: Sequence[str]) -> str | None:
    """Return the action with the first number in a reply; None if there is no such action."""
    number = re.search(r"[0-9]+", reply)
    by_number = {str(number): action for number, action in enumerate(choices, start=1)}
    return by_number.get(number.group().lstrip("0")) if number else None


def typed(reply: str) -> str:
    """Return the action of a free-text reply: its first line."""
    return reply.strip().partition("\n")[0].strip()


def tagged(reply: str, thoughts: Sequence[str] = ("think",)) -> tuple[str, bool]:
    """Return the action between `<action>` and `</action>`, in lower case, and whether the reply is valid.

    As in verl-agent, a reply is valid if it has these two tags, those of one of the `thoughts`, and no Chinese
    character. Without the tags of the action, its last 30 characters are the action.
    """
    text = reply.lower()
    start, end = text.find("<action>"), text.find("</action>")
    if -1 in (start, end):
        return text[-30:], False
    thinks = any(f"<{name}>" in reply and f"</{name}>" in reply for name in thoughts)
    valid = thinks and not re.search("[\u4e00-\u9fff]", reply)
    return text[start + len("<action>") : end].strip(), valid


def blocks(reply: str, *, cut: bool = False) -> list[str]:
    """Return what stands between lines of three backticks; with `cut`, also between the last one and the end."""
    return re.findall(rf"```(?:\w+)?[ \t]*\n(.*?)(?:```{r'|\Z' if cut else ''})", reply, re.DOTALL)


def nearest(text: str, valid_actions: Sequence[str]) -> str:
    """Return the valid action nearest to `text`: `text` itself if valid, else the one that shares the most words.

    Nearness is the Jaccard index of the sets of words, regardless of case: common words over words in either. Ties are
    broken by the most similar order of words, then alphabetically; a text that shares no word with any action is a
    tie of all.

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
