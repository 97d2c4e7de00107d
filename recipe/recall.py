"""The memory as the gateway uses it: asynchronous, off the event loop, and never in an agent's way."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from empo2.memory import BatchingEmbedder, Embedder, MemoryStore, SentenceEmbedder, Step, Tip

from .config import Settings

T = TypeVar("T")


class Recall:
    """One embedder thread and one thread that owns the memory file; the methods may be awaited concurrently.

    Raises from every method: ``EmbedderError``, ``MemoryFileError``, ``sqlite3.Error``, ``OSError``.
    """

    def __init__(self, settings: Settings, file: Path, embedder: Callable[[], Embedder] | None = None) -> None:
        memory = settings.memory
        self._settings = settings
        self._file = file
        self._embedder = BatchingEmbedder(
            embedder or partial(SentenceEmbedder, memory.embedder, device=memory.embedder_device)
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

    async def embed(self, state: str) -> np.ndarray:
        """The state's key, float32 [dimension]."""
        self.start()
        return await self._embedder.embed(state)

    async def search(self, scope: str, key: np.ndarray) -> list[Tip]:
        """The scope's tips for a state, the best first (``memory.top_k``, ``memory.min_similarity``)."""
        memory = self._settings.memory
        return await self._store(
            lambda store: store.search(scope, key, k=memory.top_k, min_similarity=memory.min_similarity)
        )

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

    async def size(self) -> int:
        """Number of tips, 0 while the memory is being opened."""
        if self._opening is None or not self._opening.done() or self._opening.exception():
            return 0
        return await self._store(lambda store: store.size())

    async def snapshot(self, path: Path) -> None:
        """A consistent copy of the memory, renamed into place."""
        await self._store(lambda store: store.snapshot(path))

    async def close(self) -> None:
        if self._opening is not None and self._opening.done() and not self._opening.exception():
            await self._store(lambda store: store.close())
        elif self._opening is not None:
            self._opening.cancel()
        await self._embedder.close()
        await asyncio.to_thread(self._thread.shutdown)
