"""Async queues in front of an embedder: urgent texts have threads of their own, and equal texts are embedded once."""

import asyncio
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from empo2.memory.embedder import PASS_TEXTS, Embedder, EmbedderError

# Texts of a batch: urgent, background. On a CPU a batch takes little less time than its texts one by one, and its first
# text waits for its last, so urgent texts are embedded alone. Agents in a batch would also ask together next time.
CPU_BATCH = (1, 4)
# An accelerator needs hardly more time for a full forward pass (`embedder.PASS_TEXTS`) than for one text.
ACCELERATOR_BATCH = (PASS_TEXTS, PASS_TEXTS)
# A tenth of the weight of threads of niceness 0. On two busy cores, urgent texts waited less than half as long as
# without it, and about as long as with 19 (a seventieth), which would almost stop the background threads there.
BACKGROUND_NICENESS = 10
RECENT_TEXTS = 16_384  # 25 MB of MiniLM keys
_CLOSED = "the embedder is closed"


class BatchingEmbedder:
    """An embedder for the coroutines of one event loop; the model runs in threads of its own.

    Urgent texts are embedded in `threads` threads, all others in as many of low priority, which have the cores for
    themselves while nothing is urgent; the oldest first. A text that already waits, is being embedded, or is among the
    last 16,384 is not embedded again.

    Args:
        embedder: its `embed` must be thread-safe; nothing else may call it.
        threads: batches embedded at once, of each of the two kinds; None for one, and on a CPU one more for every four
            cores after the first four, at most 8.
        accelerated: whether the embedder runs on an accelerator, which embeds a batch in hardly more time than a text.
    """

    def __init__(self, embedder: Embedder, threads: int | None = None, *, accelerated: bool = False) -> None:
        self.embedder = embedder
        self._threads = threads = threads or (1 if accelerated else cpu_threads())
        self._batches = ACCELERATOR_BATCH if accelerated else CPU_BATCH
        self._pools = (
            ThreadPoolExecutor(threads, thread_name_prefix="embedder"),
            ThreadPoolExecutor(threads, thread_name_prefix="embedder-background", initializer=_be_nice),
        )
        self._urgent, self._background = asyncio.Queue[str](), asyncio.Queue[str]()
        self._waiting: set[str] = set()  # the texts of the queues that nobody has taken; a queue may hold others
        self._tasks: list[asyncio.Task[None]] = []
        self._futures: dict[str, asyncio.Future[np.ndarray]] = {}  # of waiting texts and texts in a batch
        self._recent: OrderedDict[str, np.ndarray] = OrderedDict()
        self._closed = False

    async def embed(self, text: str, *, urgent: bool) -> np.ndarray:
        """Return the text's embedding, a read-only float32 [dimension] of L2 norm 1.

        Args:
            urgent: True if an agent waits for the result. A waiting text moves to the urgent ones when a later call
                is urgent.

        Raises:
            EmbedderError: this embedding failed (a later call tries again), or the embedder is closed.
        """
        if self._closed:
            raise EmbedderError(_CLOSED)
        if text in self._recent:
            self._recent.move_to_end(text)
            return self._recent[text]
        if not self._tasks:
            kinds = [*zip((self._urgent, self._background), self._batches, self._pools, strict=True)]
            self._tasks = [asyncio.create_task(self._serve(*kind)) for kind in kinds for _ in range(self._threads)]
        if text not in self._futures:
            self._futures[text] = asyncio.get_running_loop().create_future()
            self._waiting.add(text)
            (self._urgent if urgent else self._background).put_nowait(text)
        elif urgent and text in self._waiting:
            self._urgent.put_nowait(text)
        # Shielded, since others may wait for the same text when this caller is cancelled.
        return await asyncio.shield(self._futures[text])

    async def close(self) -> None:
        """Raise EmbedderError in the callers that still wait; end the threads when their running calls are done."""
        self._closed = True
        for future in self._futures.values():
            _fail(future, _CLOSED)
        self._futures.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for pool in self._pools:
            await asyncio.to_thread(pool.shutdown)

    async def _serve(self, queue: asyncio.Queue[str], most: int, pool: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch: list[str] = []
            while not batch or (len(batch) < most and not queue.empty()):
                if (text := await queue.get()) in self._waiting:
                    self._waiting.remove(text)
                    batch.append(text)
            try:
                vectors = await loop.run_in_executor(pool, self.embedder.embed, batch)
                keys = dict(zip(batch, vectors, strict=True))
            except Exception as error:
                # Only the type: the message of a tokenizer may quote the text.
                for text in batch:
                    _fail(self._futures.pop(text), f"an embedding failed: {type(error).__name__}")
            else:
                for text, key in keys.items():
                    self._futures.pop(text).set_result(self._remember(text, key))

    def _remember(self, text: str, key: np.ndarray) -> np.ndarray:
        key = key.copy()  # a view would keep its whole batch alive
        key.setflags(write=False)  # callers share it
        self._recent[text] = key
        if len(self._recent) > RECENT_TEXTS:
            self._recent.popitem(last=False)
        return key


def cpu_threads() -> int:
    """Return how many threads embed on this machine's CPU; more than 8 wait for each other's Python."""
    return min(8, max(1, len(os.sched_getaffinity(0)) // 4))


def _be_nice() -> None:
    thread = threading.get_native_id()  # on Linux, niceness is a thread's own
    os.setpriority(os.PRIO_PROCESS, thread, max(BACKGROUND_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _fail(future: asyncio.Future, reason: str) -> None:
    future.set_exception(EmbedderError(reason))
    future.exception()  # read it, or asyncio logs the exception if all callers were cancelled
