"""The memory as the gateway uses it: asynchronous, off the event loop, and never in an agent's way."""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from empo2.memory import (
    BatchingEmbedder,
    ByScore,
    BySimilarity,
    ByValue,
    Embedder,
    MemoryStore,
    Policy,
    SentenceEmbedder,
    Step,
    Tip,
)
from empo2.recipe.config import Settings

T = TypeVar("T")


class Recall:
    """One embedder thread and one thread that owns the memory file; the methods may be awaited concurrently.

    Raises from every method: ``EmbedderError``, ``MemoryFileError``, ``sqlite3.Error``, ``OSError``.
    """

    def __init__(self, settings: Settings, file: Path, embedder: Callable[[], Embedder] | None = None) -> None:
        memory = settings.memory
        self._settings = settings
        self._file = file
        self._policy = retrieval_policy(settings)
        self._embedder = BatchingEmbedder(
            embedder or partial(SentenceEmbedder, memory.embedder, device=memory.embedder_device),
            threads=memory.embedder_threads,
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory")
        self._opening: asyncio.Task[MemoryStore] | None = None

    def start(self) -> None:
        """Begin to load the embedder and open the file; returns at once, and does nothing the second time."""
        if self._opening is not None:
            return
        self._embedder.start()
        self._opening = asyncio.create_task(self._open())
        self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _open(self) -> MemoryStore:
        embedder = await self._embedder.ready()
        # What torch and transformers have made stays; to look through it again costs the event loop 0.3 seconds.
        gc.freeze()
        return await self._in_thread(
            partial(
                MemoryStore,
                self._file,
                embedder=embedder.name,
                dimension=embedder.dimension,
                capacity=self._settings.memory.capacity,
            )
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _store(self, work: Callable[[MemoryStore], T]) -> T:
        self.start()
        assert self._opening is not None
        store = await asyncio.shield(self._opening)
        return await self._in_thread(lambda: work(store))

    async def ready(self) -> None:
        """Wait until the embedder is loaded and the file is open."""
        await self._store(lambda store: None)

    async def embed(self, state: str, *, urgent: bool) -> np.ndarray:
        """The state's key, float32 [dimension]; ``urgent`` where an agent waits for it."""
        self.start()
        return await self._embedder.embed(state, urgent=urgent)

    async def search(self, scope: str, key: np.ndarray) -> list[Tip]:
        """The scope's tips for a state, the best first by ``memory.retrieval``."""
        return await self._store(lambda store: store.search(scope, key, self._policy))

    async def visit(self, scope: str, state: str, key: np.ndarray) -> int:
        """Count a visit to the state; n of the intrinsic reward 1/n."""
        threshold = self._settings.algorithm.novelty_similarity
        return await self._store(lambda store: store.visit(scope, state, key, threshold=threshold))

    async def remember(
        self, scope: str, episode: str, tip: str, score: float, success: bool, steps: Sequence[Step]
    ) -> int:
        """Store an episode's tip under each of its states; the number of entries that made."""
        return await self._store(
            lambda store: store.add_episode(scope, episode, tip=tip, score=score, success=success, steps=steps)
        )

    async def record_play(
        self, scope: str, episode: str, score: float, success: bool, searches: int, hits: int, shown: Mapping[int, int]
    ) -> None:
        """Credit the tips that were shown in an episode (tip id -> turns) with what came of it."""
        settings = self._settings
        await self._store(
            lambda store: store.record_play(
                scope,
                episode,
                score=score,
                success=success,
                searches=searches,
                hits=hits,
                shown=shown,
                reward=settings.algorithm.return_scale * score,
                learning_rate=settings.memory.value_learning_rate,
            )
        )

    async def size(self) -> int:
        """Number of tips, 0 while the memory is being opened."""
        if self._opening is None or not self._opening.done() or self._opening.exception():
            return 0
        return await self._store(lambda store: store.size())

    async def snapshot(self, path: Path) -> None:
        """A consistent copy of the memory, renamed into place."""
        await self._store(lambda store: store.snapshot(path))

    async def restore(self, path: Path) -> None:
        """Go back to a snapshot."""
        await self._store(lambda store: store.restore(path))

    async def close(self) -> None:
        if self._opening is not None and self._opening.done() and not self._opening.exception():
            await self._store(lambda store: store.close())
        elif self._opening is not None:
            self._opening.cancel()
        await self._embedder.close()
        await asyncio.to_thread(self._thread.shutdown)


def retrieval_policy(settings: Settings) -> Policy:
    """What ``memory.retrieval`` names, with its settings; its draws are seeded by ``algorithm.seed``."""
    memory = settings.memory
    if memory.retrieval == "score":
        return ByScore(memory.top_k, memory.min_similarity)
    if memory.retrieval == "similarity":
        return BySimilarity(memory.top_k, memory.min_similarity)
    return ByValue(
        memory.top_k,
        memory.min_similarity,
        candidates=memory.candidates,
        weight=memory.value_weight,
        exploration=memory.exploration,
        generator=np.random.default_rng(settings.algorithm.seed),
    )
