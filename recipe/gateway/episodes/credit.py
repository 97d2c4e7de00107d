"""Credit the tips that finished episodes were shown with what they were worth."""

from collections import defaultdict
from collections.abc import Collection

from empo2.memory import NewPlay
from empo2.recipe.gateway.episodes.episode import Episode
from empo2.recipe.gateway.services import Services
from empo2.recipe.protocol import is_success, place_in_range, scaled_return


class TipCredit:
    """Record finished episodes in the memory, each with the reward that the values of its tips learn from.

    The reward is the return's place in its range, -1 for ``failure_return`` and 1 for ``success_return``, as MemRL's is
    +1 or -1: a tip that misleads falls below one that was never tried, whose value is 0. In a paired group it is the
    scaled return minus the mean of the rollouts without tips, so those episodes wait for `conclude_pairs`.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._baselines: defaultdict[str, list[float]] = defaultdict(list)  # pair -> scaled returns without tips
        self._waiting: list[tuple[Episode, float]] = []

    async def finished(self, episode: Episode, score: float) -> None:
        """Record an episode that ended with a return, now or with its pair."""
        pair = episode.tag.pair
        if pair is None:
            algorithm = self._services.settings.algorithm
            reward = place_in_range(score, algorithm.failure_return, algorithm.success_return)
            await self._record(episode, score, reward)
        elif episode.tag.memory:
            self._waiting.append((episode, score))
        else:
            self._baselines[pair].append(scaled_return(self._services.settings.algorithm, score))

    async def conclude_pairs(self, open_pairs: Collection[str]) -> None:
        """Record the episodes of paired groups; where no rollout without tips has a return, the baseline is 0.

        Args:
            open_pairs: those of which more rollouts may end; their episodes go on waiting.
        """
        baselines = {pair: self._baselines.pop(pair) for pair in self._baselines.keys() - open_pairs}
        ended = [(episode, score) for episode, score in self._waiting if episode.tag.pair not in open_pairs]
        self._waiting = [(episode, score) for episode, score in self._waiting if episode.tag.pair in open_pairs]
        for episode, score in ended:
            without = baselines.get(episode.tag.pair or "", [])
            baseline = sum(without) / len(without) if without else 0.0
            await self._record(episode, score, scaled_return(self._services.settings.algorithm, score) - baseline)

    async def _record(self, episode: Episode, score: float, reward: float) -> None:
        if not episode.searches:
            return
        play = NewPlay(
            episode.tag.scope,
            episode.rollout_id,
            score=score,
            success=is_success(score, self._services.settings.algorithm.success_return),
            searches=episode.searches,
            hits=episode.hits,
            shown=episode.shown,
            reward=reward,
        )
        try:
            await self._services.memory.record_play(play)
        except Exception as error:
            self._services.memory_failed(error)
