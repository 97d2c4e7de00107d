"""The advantage of each tagged turn among the turns of its group with the same tag, beside its rollout's."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from empo2.recipe.config import Algorithm
from empo2.recipe.messages import reply_of, spoken
from empo2.recipe.protocol import is_success
from empo2.recipe.trainer.advantages import compare_halves
from empo2.recipe.trainer.rows import Turn
from empo2.recipe.trainer.step_results import RolloutResult, StepResults, groups_of

_TAGS = ("planning", "explore", "reflection", "monitor")
_TAG = re.compile(rf"<({'|'.join(_TAGS)})>.*</\1>", re.DOTALL)
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
# How ScienceWorld, ALFWorld and the houses answer what they do not take; there the authors ask the world itself.
_REFUSED = re.compile(r"No known action matches that input|Nothing happens|That does nothing")
_FEW_TAGGED = 0.2


def warning(metrics: Mapping[str, float]) -> str:
    """Return one line if fewer than 20 % of the turns have a tag; "" otherwise."""
    tagged = sum(metrics[f"rlvmr/{tag}"] for tag in _TAGS)
    if tagged >= _FEW_TAGGED:
        return ""
    return (
        f"WARNING: algorithm.advantage='rlvmr': only {tagged:.0%} of the turns have a tag and an action; "
        "tasks.args.actions=meta asks for them; warm the model up on tagged episodes"
    )


def step_rewards(replies: Sequence[str], refused: Sequence[bool], success: bool) -> list[tuple[str, float]]:
    """Return tag and reward of each turn of an episode; "" and 0 for one without a tag or an action.

    A reward is 1 or 0, as in the authors' code: planning, if the episode is a success; exploring, if no earlier turn
    with a tag took this action; reflecting, if the turn before was refused or had no tag, and this one does something
    else. Monitoring has none.
    """
    rewards: list[tuple[str, float]] = []
    taken, last, last_took = set[str](), "", False
    for reply, was_refused in zip(replies, refused, strict=True):
        tag, action = _TAG.search(reply), _ACTION.search(reply)
        if tag and action:
            done = action[1].strip()
            earned = {
                "planning": success,
                "explore": done not in taken,
                "reflection": not last_took and done != last,
                "monitor": False,
            }
            rewards.append((tag[1], float(earned[tag[1]])))
            taken.add(done)
        else:
            rewards.append(("", 0.0))
        last, last_took = action[1].strip() if action else "", bool(tag and action) and not was_refused
    return rewards


def turn_advantages(results: StepResults, algorithm: Algorithm) -> tuple[dict[Turn, float], dict[str, float]]:
    """Return the advantage of each turn: its reward relative to those with the same tag in its group.

    Turns are compared as rollouts are (`rollout_advantages`); 0 for one without a tag, alone, or where all are equal.

    Returns:
        With them come metrics: the fraction of turns with each tag, and the mean reward of tagged turns.
    """
    rewards: dict[Turn, tuple[str, float]] = {}
    for rollout, result in results.kept.items():
        turns = results.turns(rollout)
        replies = [spoken(reply_of(turn.data["response"]) or {}) for turn in turns]
        refused = [bool(_REFUSED.search(turn.observation)) for turn in turns[1:]] + [False]  # the next one says so
        earned = step_rewards(replies, refused, is_success(result.return_, algorithm.success_return))
        rewards |= {(rollout, turn.number): each for turn, each in zip(turns, earned, strict=True)}
    advantages = dict.fromkeys(rewards, 0.0)
    for group in groups_of(results.kept):
        by_tag: defaultdict[str, dict[Turn, RolloutResult]] = defaultdict(dict)
        for turn, (tag, _) in rewards.items():
            if tag and turn[0] in group:
                by_tag[tag][turn] = group[turn[0]]
        for turns in by_tag.values():
            advantages |= compare_halves(
                turns, lambda members: [rewards[turn][1] for turn in members], algorithm.normalize_by_std
            )
    tags = [tag for tag, _ in rewards.values()]
    tagged = [reward for tag, reward in rewards.values() if tag]
    metrics = {f"rlvmr/{tag}": tags.count(tag) / len(tags) for tag in _TAGS}
    return advantages, metrics | {"rlvmr/reward": sum(tagged) / max(len(tagged), 1)}
