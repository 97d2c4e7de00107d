"""An async front to an embedder: what many callers ask for is embedded in few batches, in one thread."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from empo2.memory.embedder import Embedder, EmbedderError

MAX_BATCH = 64  # texts per forward pass; on a CPU 64 are no faster per text than 16, so more would only add delay
RECENT_TEXTS = 4096  # 6 MB of MiniLM keys


class BatchingEmbedder:
    """An embedder for the coroutines of one event loop; model and embeddings live in one thread of its own.

    All texts that wait when the thread gets free go into the next batch. A text that is waiting already, or is
    among the last 4,096 embedded, is not embedded again.

    Args:
        factory: makes the embedder; called once, in the thread.
    """

    def __init__(self, factory: Callable[[], Embedder]) -> None:
        self._factory = factory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedder")
        self._task: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[Embedder] | None = None
        self._waiting: dict[str, asyncio.Future[np.ndarray]] = {}  # oldest first; the batch in flight included
        self._arrival = asyncio.Event()
        self._recent: OrderedDict[str, np.ndarray] = OrderedDict()
        self._refusal: str | None = "the embedder is not running: call start() first"

    def start(self) -> None:
        """Begin to load the model; returns at once. To be called once, in the event loop."""
        loop = asyncio.get_running_loop()
        self._refusal = None
        self._loaded = loop.create_future()
        self._task = loop.create_task(self._run(self._loaded))

    async def ready(self) -> Embedder:
        """The loaded embedder, for its name and dimension (its `embed` belongs to the thread).

        Raises:
            EmbedderError: the model did not load, or the embedder is not running.
        """
        if self._refusal or self._loaded is None:
            raise EmbedderError(self._refusal)
        return await asyncio.shield(self._loaded)

    async def embed(self, text: str) -> np.ndarray:
        """The text's embedding, a read-only float32 [dimension] of L2 norm 1; waits for the model if need be.

        Raises:
            EmbedderError: the model did not load (then for good), this embedding failed (another call tries
                again), or the embedder is not running.
        """
        if self._refusal:
            raise EmbedderError(self._refusal)
        if text in self._recent:
            self._recent.move_to_end(text)
            return self._recent[text]
        if text not in self._waiting:
            self._waiting[text] = asyncio.get_running_loop().create_future()
            self._arrival.set()
        # Shielded: others may wait for the same text when this caller is cancelled.
        return await asyncio.shield(self._waiting[text])

    async def close(self) -> None:
        """Fail the callers that still wait (EmbedderError), then end the thread once its running call is done."""
        self._stop("the embedder is closed")
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self, loaded: asyncio.Future[Embedder]) -> None:
        loop = asyncio.get_running_loop()
        try:
            embedder = await loop.run_in_executor(self._thread, self._factory)
        except Exception as error:
            self._stop(f"the embedder did not load: {error!r}")
            return
        loaded.set_result(embedder)
        while True:
            await self._arrival.wait()
            batch = list(islice(self._waiting, MAX_BATCH))
            try:
                vectors = await loop.run_in_executor(self._thread, embedder.embed, batch)
                keys = dict(zip(batch, vectors, strict=True))
            except Exception as error:
                for text in batch:
                    _fail(self._waiting.pop(text), f"an embedding failed: {error!r}")
            else:
                for text, key in keys.items():
                    self._waiting.pop(text).set_result(self._remember(text, key))
            if not self._waiting:
                self._arrival.clear()

    def _remember(self, text: str, key: np.ndarray) -> np.ndarray:
        key = key.copy()  # a view would keep its whole batch alive
        key.setflags(write=False)  # callers share it
        self._recent[text] = key
        if len(self._recent) > RECENT_TEXTS:
            self._recent.popitem(last=False)
        return key

    def _stop(self, reason: str) -> None:
        self._refusal = reason
        if self._loaded and not self._loaded.done():
            _fail(self._loaded, reason)
        for future in self._waiting.values():
            _fail(future, reason)
        self._waiting.clear()


def _fail(future: asyncio.Future, reason: str) -> None:
    future.set_exception(EmbedderError(reason))
    future.exception()  # seen: asyncio shall not complain if the callers have been cancelled meanwhile
