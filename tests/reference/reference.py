"""The objective of EMPO² (arXiv 2602.23008) and what is played before it, in plain Python and numpy.

It reads like docs/algorithm.md, shares no code with the project, and computes in long doubles, where 1e308 has a mean.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Real = np.longdouble
ROUNDING = 1e-9  # what two sums of the same numbers may differ by, as a share of what they are compared with


@dataclass(frozen=True)
class Ask:
    """A request, however often it was sent: the policy is asked for one action in one state."""

    chat: int  # that it belongs to, or 0 for an agent that sends nothing but its state
    state: int
    length: int  # of the observation, in tokens
    replies: tuple[tuple[int, ...], ...]  # one for each time that it was sent; token ids, unique in the episode
    used: int  # which of them the agent acted on
    log_probs: float | None  # of each token; None, NaN or vLLM's -9999 are no log-probs
    tip_free: bool = True  # whether its prompt without tips is known

    @property
    def reply(self) -> tuple[int, ...]:
        return self.replies[self.used]

    @property
    def known(self) -> bool:
        return self.log_probs is not None and self.log_probs > -9999


@dataclass(frozen=True)
class Episode:
    group: int
    memory: bool
    off_policy: bool
    asks: tuple[Ask, ...]
    return_: float | None  # None if the agent failed
    held: bool = False  # off-policy, but trained with its tips, by the KL alone

    @property
    def tip_free(self) -> bool:
        return self.off_policy and not self.held


@dataclass(frozen=True)
class Rules:
    success: float
    failure: float
    coefficient: float  # of the intrinsic reward, a share of the range
    tolerance: float  # a share of the range
    by_std: bool
    discount: float | None  # of GiGPO; None without
    failed_return: float | None
    longest_prompt: int
    room: int  # of a row, behind its first prompt
    delta: float
    low: float
    high: float
    dual: float
    kl: float
    kl_with_tips: bool
    distillation: float | None  # κ; None without
    reverse: bool
    imitates: bool  # what was sampled is the teacher's certainty; never with reverse
    holds: bool  # off-policy episodes that are not distilled

    @property
    def range(self) -> Any:
        return Real(self.success) - Real(self.failure)

    def solved(self, return_: Any) -> bool:
        return bool(Real(return_) >= Real(self.success) - Real(1e-6) * max(1.0, abs(self.success)))


# What an episode was


def visits(asks: Sequence[Ask], before: dict[int, int]) -> list[int]:
    """n of each ask: visits to its state in earlier steps, those of this episode, and this one; 0 if none was made."""
    counted = defaultdict(int, before)
    found = []
    for ask in asks:
        counted[ask.state] += any(ask.replies)
        found.append(counted[ask.state] if any(ask.replies) else 0)
    return found


def prompt(asks: Sequence[Ask], number: int, tips: bool) -> tuple[int, ...]:
    """A chat is begun by its number, and by a tip if there are any; each ask adds an observation, then a reply."""
    ask = asks[number]
    earlier = [each for each in asks[:number] if ask.chat and each.chat == ask.chat]
    said = [token for each in earlier for token in observation(each) + each.reply]
    return (900,) * tips + (100 + ask.chat, *said) + observation(ask)


def observation(ask: Ask) -> tuple[int, ...]:
    return (30 + ask.length,) * (ask.length - 1) + (20 + ask.state,)


@dataclass(frozen=True)
class Row:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # what follows it
    turns: tuple[int | None, ...]  # of each of these, the ask that it was sampled in; None for an observation


def rows(episode: Episode, rules: Rules) -> list[Row]:
    """A chat is a row, as long as each of its prompts begins with the one before: from the first turn that is known."""
    made = []
    with_tips = episode.memory and not episode.tip_free
    chats: dict[int, list[int]] = defaultdict(list)
    for number, ask in enumerate(episode.asks):
        if ask.reply and ask.known and (ask.tip_free or not episode.tip_free):
            chats[ask.chat or -1 - number].append(number)
    for numbers in chats.values():
        begin = prompt(episode.asks, numbers[0], with_tips)
        if len(begin) > rules.longest_prompt:
            continue
        tokens, turns = [], []
        for number in numbers:
            observed = prompt(episode.asks, number, with_tips)[len(begin) + len(tokens) :]
            tokens += [*observed, *episode.asks[number].reply]
            turns += [None] * len(observed) + [number] * len(episode.asks[number].reply)
        made.append(Row(begin, tuple(tokens[: rules.room]), tuple(turns[: rules.room])))
    return made


def turns_of(made: Sequence[Row]) -> set[int]:
    return {turn for row in made for turn in row.turns if turn is not None}


# Who is compared with whom


def advantages[T](
    members: Sequence[T], kind: Callable[[T], Episode], score: Callable[[T, bool], Any], rules: Rules
) -> dict[T, Any]:
    """(score - mean) / (std + 1e-6), of W among themselves and of T against W or, on-policy, among themselves."""
    found: dict[T, Any] = {}
    without = [member for member in members if not kind(member).memory]
    for half in (without, [member for member in members if kind(member).memory]):
        others = without if half and half is not without and kind(half[0]).off_policy else []
        compared = [*others, *half]
        solved = all(rules.solved(kind(member).return_) for member in compared)
        scores = [score(member, not solved) for member in compared]
        least = rules.tolerance * rules.range * (1 - ROUNDING)
        if not scores or max(scores) == min(scores) or max(scores) - min(scores) < least:
            found |= dict.fromkeys(half, Real(0))
            continue
        mean = np.mean(scores[: len(others)] or scores)
        std = np.std(scores, ddof=1) / rules.range + Real(1e-6) if rules.by_std else Real(1)
        most = Real(np.inf if rules.by_std else 1e20)
        found |= {m: np.clip((score(m, not solved) - mean) / rules.range / std, -most, most) for m in half}
    return found


def kept(episodes: Sequence[Episode], rules: Rules) -> list[tuple[int, Episode]]:
    """What can be used of the episodes; those that are held have a row with their tips."""
    left = usable(episodes, rules)
    if not rules.holds or rules.distillation is None:
        return left
    taught, made = imitated(episodes, rules), []
    for number, episode in left:
        held = replace(episode, held=episode.off_policy and number not in taught)
        made.append((number, held if rows(held, rules) else episode))
    return made


def usable(episodes: Sequence[Episode], rules: Rules) -> list[tuple[int, Episode]]:
    """Episodes with a finite return and a row, of which another one of the group has them, too."""
    left = []
    for number, each in enumerate(episodes):
        return_ = rules.failed_return if each.return_ is None else each.return_
        played = Episode(each.group, each.memory, each.off_policy, each.asks, return_)
        if return_ is not None and np.isfinite(return_) and rows(each, rules):
            left.append((number, played))
    sizes = [episode.group for _, episode in left]
    return [(number, episode) for number, episode in left if sizes.count(episode.group) > 1]


def token_advantages(episodes: Sequence[Episode], rules: Rules, before: dict[int, int]) -> dict[tuple[int, int], Any]:
    """A_i, with GiGPO A_i + A^S_it, by episode and ask."""
    found: dict[tuple[int, int], Any] = {}
    left = dict(kept(episodes, rules))
    earned = {i: [Real(1) / n if n else Real(0) for n in visits(left[i].asks, before)] for i in left}
    new = rules.coefficient * rules.range

    def score(number: int, intrinsic: bool) -> Any:
        return Real(left[number].return_) + intrinsic * new * sum(earned[number], start=Real(0))

    for group in {episode.group for episode in left.values()}:
        members = [number for number in left if left[number].group == group]
        of_episodes = advantages(members, left.__getitem__, score, rules)
        turns = [(number, turn) for number in members for turn in sorted(turns_of(uncut(left[number], rules)))]
        found |= {(number, turn): of_episodes[number] for number, turn in turns}
        if rules.discount is None:
            continue

        def turn_score(place: tuple[int, int], intrinsic: bool) -> Any:
            number, turn = place
            asked = [ask for ask, each in enumerate(left[number].asks) if any(each.replies)]
            later = Real(left[number].return_) - Real(rules.failure)
            for ask in reversed(asked[asked.index(turn) :]):
                gain = later if ask == asked[-1] else Real(rules.discount) * later
                later = gain + intrinsic * new * earned[number][ask]
            return later

        for state in {left[number].asks[turn].state for number, turn in turns}:
            cluster = [(number, turn) for number, turn in turns if left[number].asks[turn].state == state]
            of_turns = advantages(cluster, lambda place: left[place[0]], turn_score, rules)
            found |= {place: found[place] + of_turns[place] for place in cluster}
    return found


def uncut(episode: Episode, rules: Rules) -> list[Row]:
    return rows(episode, Rules(**{**rules.__dict__, "room": 10**9}))


def imitated(episodes: Sequence[Episode], rules: Rules) -> set[int]:
    """Off-policy episodes that succeeded, or did better than the mean of W, or of the group, by the tolerance."""
    left, chosen = dict(usable(episodes, rules)), set()
    for number, episode in left.items():
        group = [each for each in left.values() if each.group == episode.group]
        without = [Real(each.return_) for each in group if not each.memory]
        mean = np.mean(without or [Real(each.return_) for each in group])
        better = Real(episode.return_) - mean > rules.tolerance * rules.range * (1 + ROUNDING)
        if episode.off_policy and (rules.solved(episode.return_) or better):
            chosen.add(number)
    return chosen


# The loss


@dataclass(frozen=True)
class Token:
    """A trained token: where it stands, and all that its term of the sum needs."""

    number: int  # of its episode
    context: tuple[int, ...]
    id: int
    episode: Episode
    old: Any
    advantage: Any
    weight: Any  # 1/(M T)
    distilled: bool


def tokens(episodes: Sequence[Episode], rules: Rules, before: dict[int, int]) -> Iterator[Token]:
    left, weighed = kept(episodes, rules), token_advantages(episodes, rules, before)
    chosen = imitated(episodes, rules) if rules.distillation is not None else set()
    for number, episode in left:
        made = rows(episode, rules)
        total = sum(turn is not None for row in made for turn in row.turns)
        for row in made:
            for place, (token, turn) in enumerate(zip(row.tokens, row.turns, strict=True)):
                if turn is not None:
                    distils = rules.distillation is not None and episode.off_policy
                    advantage = Real(0) if distils else weighed[number, turn]
                    context, old = row.prompt + row.tokens[:place], Real(episode.asks[turn].log_probs)
                    weight = Real(1) / (len(left) * total)
                    yield Token(number, context, token, episode, old, advantage, weight, number in chosen)


def term(token: Token, new: Any, reference: Any, tops: Sequence[tuple[Any, Any]], rules: Rules) -> Any:
    """One token's share of the loss; `tops` are the log-probs of the teacher's likeliest tokens, and the student's."""
    a, off_policy = token.advantage, token.episode.off_policy
    ratio = np.exp(np.clip(new - token.old, -20, 20))
    gain = min(ratio * a, np.clip(ratio, 1 - Real(rules.low), 1 + Real(rules.high)) * a)
    gain = max(gain, rules.dual * a) if a < 0 else gain
    if off_policy and rules.distillation is None and rules.delta > 0 and new < np.log(Real(rules.delta)):
        gain = Real(0)
    d = reference - new
    held = not rules.kl_with_tips or (token.episode.memory and not token.episode.tip_free)
    loss = -gain + held * rules.kl * min(np.exp(d) - d - 1, Real(10))  # verl's kl_penalty
    if rules.imitates:
        tops = [(0.0, student) for _, student in tops[:1]]
    if token.distilled and tops:
        p, q = (np.exp(np.array(each, Real)) for each in zip(*tops, strict=True))
        p, q = (np.append(each, max(1 - each.sum(), Real(1e-5))) for each in (p, q))
        loss += Real(rules.distillation) * ((q * np.log(q / p)).sum() if rules.reverse else (p * np.log(p / q)).sum())
    return token.weight * loss
