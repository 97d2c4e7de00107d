"""Keep a record of each action in each state with its learned value, and show the best and the worst of similar states.

A record is a tip of one state; its score is Q, which stands in its text too.
"""

from collections.abc import Sequence

import numpy as np

from empo2.memory import Step
from empo2.memory.retrieval import Entries, Policy, Ranked, first_of_texts
from empo2.recipe.config import Settings
from empo2.recipe.gateway.episodes.episode import Episode
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.messages import spoken
from empo2.recipe.protocol import scaled_return

STEPS, DISCOUNT = 5, 0.95  # n, and the factor of a step's later rewards [ours: the paper's fit its worlds]
_SAME = Ranked(("scores",), k=1000, min_similarity=0.9999)  # the records of one state
_CHARACTERS = 300  # of state and action


def policy(settings: Settings) -> Policy:
    """Return the policy of ``memory.retrieval=actions``.

    Of the most similar records it takes the half of ``top_k`` with the highest Q, and that with the lowest, by falling
    Q; equal ones by similarity, then newest first.
    """
    memory, k = settings.memory, settings.memory.top_k

    def best_and_worst(entries: Entries) -> np.ndarray:
        similar = np.flatnonzero(entries.similarities > memory.min_similarity)
        rows = first_of_texts(similar, (entries.similarities,), entries.texts, memory.candidates)
        ranked = rows[np.lexsort((rows, entries.similarities[rows], entries.scores[rows]))[::-1]]
        if len(ranked) <= k:
            return ranked
        return np.concatenate([ranked[: k - k // 2], ranked[len(ranked) - k // 2 :]])

    return best_and_worst


async def tip(reflector: Reflector, episode: Episode, score: float, success: bool) -> None:
    """Record the actions of an episode, the last one first; equal actions of a state share a record.

    Q <- Q + ``memory.value_learning_rate`` (target - Q), where Q of a new record is its first target.
    """
    services = reflector.services
    settings, memory = services.settings, services.memory
    turns = [(turn, turn.embedding) for turn in episode.turns if turn.embedding is not None]
    rewards = [*[0.0] * (len(turns) - 1), scaled_return(settings.algorithm, score)]

    async def known(turn: int) -> dict[str, tuple[int, float]]:
        found = await memory.search(episode.tag.scope, turns[turn][1], policy=_SAME)
        return {each.action: (each.id, each.score) for each in found}

    async with reflector.writing:  # no other episode changes a record between its reading and its writing
        for number in reversed(range(len(turns))):
            later = number + STEPS
            best = max((q for _, q in (await known(later)).values()), default=0.0) if later < len(turns) else 0.0
            target = n_step_target(rewards, number, best)
            turn, embedding = turns[number]
            action = spoken(turn.reply)
            record = (await known(number)).get(action)
            q = target if record is None else record[1] + settings.memory.value_learning_rate * (target - record[1])
            text = f'here "{" ".join(action[:_CHARACTERS].split())}" was worth {q:.2f}'
            if record is not None:
                await memory.revise(record[0], text, q)
            else:
                name, step = f"{episode.rollout_id}/{number}", Step(turn.state, embedding, action)
                await memory.add_episode(episode.tag.scope, name, text, q, success, [step])
                services.metrics.counts["tips_written"] += 1


def n_step_target(rewards: Sequence[float], step: int, best: float) -> float:
    """Return the discounted rewards of the next `STEPS` steps, and what the best action is worth after them.

    Args:
        best: max over a of Q(s, a) in the state `STEPS` later; counts only if the episode goes on until then.
    """
    soon = sum(DISCOUNT**number * reward for number, reward in enumerate(rewards[step : step + STEPS]))
    return soon + (DISCOUNT**STEPS * best if step + STEPS < len(rewards) else 0.0)
