"""The memory for the coroutines of one event loop: an embedder and a store, each in its own threads."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from empo2.memory.batching import BatchingEmbedder
from empo2.memory.index import cosine_similarities, unit
from empo2.memory.novelty import Visit
from empo2.memory.retrieval import Policy
from empo2.memory.store import MemoryStore, NewPlay, Step, Tip


class MemoryService:
    """Search and write one memory file, off the event loop; the methods may be awaited concurrently.

    Visits of running episodes are held in RAM until `commit_visits`, so that the reward of one episode does not
    depend on the progress of the others.

    Args:
        file, capacity: as `MemoryStore` takes them.
        embedder: is closed with the memory.
        policy: chooses the tips of a search.
        novelty_similarity: cosine above which two states count as similar.
        value_learning_rate: of the learned values of shown tips.

    Raises from every method: ``EmbedderError``, ``MemoryFileError``, ``sqlite3.Error``, ``OSError``.
    """

    def __init__(
        self,
        file: Path,
        embedder: BatchingEmbedder,
        policy: Policy,
        *,
        capacity: int,
        novelty_similarity: float,
        value_learning_rate: float,
    ) -> None:
        self._policy = policy
        self._novelty_similarity = novelty_similarity
        self._value_learning_rate = value_learning_rate
        self._visits: defaultdict[str, list[Visit]] = defaultdict(list)  # episode -> visits not committed yet
        self._asked: list[tuple[Visit, asyncio.Future[int]]] = []  # not looked up yet, and the answers
        self._looks_up = 0  # look-ups that are under way
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory")
        self._embedder, self.embedder = embedder, embedder.embedder
        name, self._dimension = self.embedder.name, self.embedder.dimension

        try:
            opened = self._thread.submit(MemoryStore, file, embedder=name, dimension=self._dimension, capacity=capacity)
            self._store = opened.result()
            self.size = self._thread.submit(self._store.size).result()  # tips, as of the last change that is done
        except BaseException:
            self._thread.shutdown()
            raise

    async def _in_thread[T](self, work: Callable[[MemoryStore], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)

    async def embed(self, state: str, *, urgent: bool) -> np.ndarray:
        """Return the state's embedding, float32 [dimension]; ``urgent`` is True if an agent waits for it."""
        return await self._embedder.embed(state, urgent=urgent)

    async def search(
        self, scope: str, embedding: np.ndarray, *, exclude: Collection[str] = (), policy: Policy | None = None
    ) -> list[Tip]:
        """Return the scope's best tips for a state by the policy, without those whose text is in ``exclude``."""
        policy = policy or self._policy
        return await self._in_thread(lambda store: store.search(scope, embedding, policy, exclude=exclude))

    async def texts(self, ids: Collection[int]) -> dict[int, str]:
        """Return the texts of tips by id, without those that are not stored."""
        return await self._in_thread(lambda store: store.texts(ids))

    async def revise(self, tip: int, text: str, score: float | None = None) -> None:
        """Give a tip another text, and another score if one is given; see `MemoryStore`."""
        await self._in_thread(lambda store: store.revise(tip, text, score))

    async def visit(self, scope: str, episode: str, state: str, embedding: np.ndarray) -> int:
        """Count an episode's visit to a state and return n >= 1, for the intrinsic reward 1/n.

        n is the sum of the committed visits to similar states, the episode's own since the last commit, and this one.
        Visits of other episodes count after the next `commit_visits`.
        """
        embedding = unit(embedding, self._dimension)
        own = self._visits[episode]
        keys = np.array([visit.key for visit in own]) if own else np.empty((0, len(embedding)), np.float32)
        before = int((cosine_similarities(keys, embedding) > self._novelty_similarity).sum())
        own.append(Visit(scope, state, embedding))
        stored = asyncio.get_running_loop().create_future()
        self._asked.append((own[-1], stored))
        if not self._looks_up:
            self._look_up()
        return before + 1 + await stored

    def novelty(self, embedding: np.ndarray, visits: int) -> float:
        """Return what a visit earns, 0 to 1: 1/n. A subclass may judge by the state's embedding, [dimension]."""
        return 1 / visits

    def take_back(self, episode: str, visits: int) -> None:
        """Forget an episode's newest visits, of those that are not committed: they were none."""
        own = self._visits[episode]
        del own[max(0, len(own) - visits) :]

    def _look_up(self) -> None:
        """Look up together all visits that came during the last look-up: a search waits for one job, not for each."""
        asked, self._asked = self._asked, []
        self._looks_up += 1

        def look_up(store: MemoryStore) -> list[int]:
            return store.states.count([visit for visit, _ in asked], threshold=self._novelty_similarity)

        def answer(job: asyncio.Future[list[int]]) -> None:
            self._looks_up -= 1
            if self._asked and not self._looks_up:
                self._look_up()
            for number, (_, future) in enumerate(asked):
                if future.done():  # its caller was cancelled
                    continue
                if error := job.exception():
                    future.set_exception(error)
                else:
                    future.set_result(job.result()[number])

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, look_up, self._store).add_done_callback(answer)

    async def commit_visits(self) -> None:
        """Store the visits since the last commit in one transaction, also those of failed episodes.

        Visits that cannot be stored are lost.
        """
        if self._asked:
            self._look_up()  # before these visits count as past ones
        visits = [visit for own in self._visits.values() for visit in own]
        self._visits.clear()
        if visits:
            await self._in_thread(lambda store: store.states.add_visits(visits, threshold=self._novelty_similarity))

    async def add_episode(
        self, scope: str, episode: str, tip: str, score: float, success: bool, steps: Sequence[Step]
    ) -> int | None:
        """Store an episode's tip under each of its states; return its id, None if nothing is stored."""
        tip_id = await self._in_thread(
            lambda store: store.add_episode(scope, episode, tip=tip, score=score, success=success, steps=steps)
        )
        self.size = await self._in_thread(MemoryStore.size)
        return tip_id

    async def record_play(self, play: NewPlay) -> None:
        """Credit the tips that an episode was shown with its result; see `MemoryStore`."""
        await self._in_thread(lambda store: store.record_play(play, learning_rate=self._value_learning_rate))

    async def snapshot(self, path: Path) -> None:
        """Commit the visits, then put a consistent copy of the memory at ``path``."""
        await self.commit_visits()
        await self._in_thread(lambda store: store.snapshot(path))

    async def restore(self, path: Path) -> None:
        """Restore a snapshot; visits that are not committed are dropped."""
        await self._in_thread(lambda store: store.restore(path))
        self._visits.clear()
        self.size = await self._in_thread(MemoryStore.size)

    async def close(self) -> None:
        """Commit the visits and close file and embedder."""
        try:
            await self.commit_visits()
        finally:
            await self._in_thread(lambda store: store.close())
            await self._embedder.close()
            await asyncio.to_thread(self._thread.shutdown)
