"""The async front: right vectors, few batches, and an error for everyone when there is none."""

import asyncio
import threading
import time

import numpy as np
import pytest

from empo2.memory import BatchingEmbedder, EmbedderError
from empo2.memory.batching import MAX_BATCH, RECENT_TEXTS

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


def letters_of(text):
    counts = np.array([1 + text.count(chr(97 + i)) for i in range(26)], np.float32)
    return counts / np.linalg.norm(counts)


class Letters:
    """Embeds a text as its letter counts; keeps the batches it was given, and waits at the gate for each."""

    name, dimension = "letters", 26

    def __init__(self):
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def embed(self, texts):
        assert threading.current_thread().name.startswith("embedder")
        self.batches.append(list(texts))
        self.gate.wait()
        if self.failure:
            raise self.failure
        return np.array([letters_of(text) for text in texts])


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def batching(letters):
    return BatchingEmbedder(lambda: letters)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def test_many_callers_get_their_own_vectors_in_few_batches(letters, batching):
    texts = [chr(97 + i % 26) * (1 + i // 26) for i in range(128)]
    batching.start()
    vectors = await asyncio.gather(*map(batching.embed, texts))
    await batching.close()
    assert [len(batch) for batch in letters.batches] == [MAX_BATCH, MAX_BATCH]
    for text, vector in zip(texts, vectors, strict=True):
        assert np.array_equal(vector, letters_of(text))


async def test_what_waits_when_the_thread_gets_free_is_one_batch(letters, batching):
    letters.gate.clear()
    batching.start()
    first = asyncio.create_task(batching.embed("first"))
    await until(lambda: letters.batches)
    others = [asyncio.create_task(batching.embed(text)) for text in "abc"]
    await asyncio.sleep(0)
    letters.gate.set()
    await asyncio.gather(first, *others)
    await batching.close()
    assert letters.batches == [["first"], ["a", "b", "c"]]


async def test_a_text_is_embedded_once(letters, batching):
    letters.gate.clear()
    batching.start()
    waiting = [asyncio.create_task(batching.embed("x")) for _ in range(3)]
    await until(lambda: letters.batches)
    waiting += [asyncio.create_task(batching.embed("x"))]  # in flight by now
    await asyncio.sleep(0)
    letters.gate.set()
    vectors = [*await asyncio.gather(*waiting), await batching.embed("x")]  # and the last from the recent ones
    await batching.close()
    assert letters.batches == [["x"]]
    assert all(vector is vectors[0] for vector in vectors)
    with pytest.raises(ValueError, match="read-only"):
        vectors[0][0] = 1


async def test_only_texts_not_asked_for_lately_are_forgotten(letters, batching):
    batching.start()
    await batching.embed("kept")
    await batching.embed("forgotten")
    await batching.embed("kept")
    await asyncio.gather(*(batching.embed(f"{i}") for i in range(RECENT_TEXTS - 1)))
    letters.batches.clear()
    await batching.embed("kept")
    await batching.embed("forgotten")
    await batching.close()
    assert letters.batches == [["forgotten"]]


async def test_the_event_loop_runs_while_the_model_loads(letters):
    loading = threading.Event()

    def load():
        loading.wait()
        return letters

    batching = BatchingEmbedder(load)
    batching.start()
    caller = asyncio.create_task(batching.embed("x"))
    started = time.monotonic()
    await asyncio.sleep(0.01)
    assert time.monotonic() - started < 5 and not caller.done()
    loading.set()
    assert await batching.ready() is letters
    assert np.array_equal(await caller, letters_of("x"))
    await batching.close()


async def test_a_failed_embedding_fails_its_callers_and_the_next_call_tries_again(letters, batching):
    batching.start()
    letters.failure = RuntimeError("out of ink")
    outcomes = await asyncio.gather(*map(batching.embed, "aab"), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["an embedding failed: RuntimeError('out of ink')"] * 3
    assert all(isinstance(outcome, EmbedderError) for outcome in outcomes)
    letters.failure = None
    assert np.array_equal(await batching.embed("a"), letters_of("a"))
    await batching.close()


async def test_an_embedder_that_loses_rows_fails_its_callers(letters, batching):
    letters.embed = lambda texts: np.ones((1, 26))
    batching.start()
    outcomes = await asyncio.gather(*map(batching.embed, "ab"), return_exceptions=True)
    await batching.close()
    assert [type(outcome) for outcome in outcomes] == [EmbedderError] * 2


async def test_a_failed_load_is_remembered():
    loads = []

    def load():
        loads.append(1)
        raise OSError("no such model")

    batching = BatchingEmbedder(load)
    batching.start()
    outcomes = await asyncio.gather(batching.ready(), *map(batching.embed, "ab"), return_exceptions=True)
    for call in (batching.ready, lambda: batching.embed("later")):
        with pytest.raises(EmbedderError) as failure:
            await call()
        outcomes.append(failure.value)
    await batching.close()
    assert {str(outcome) for outcome in outcomes} == {"the embedder did not load: OSError('no such model')"}
    assert loads == [1]


async def test_closing_fails_who_waits_and_ends_the_thread(letters, batching):
    letters.gate.clear()
    batching.start()
    running = asyncio.create_task(batching.embed("running"))
    await until(lambda: letters.batches)
    waiting = asyncio.create_task(batching.embed("waiting"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(batching.close())
    for caller in (running, waiting, asyncio.create_task(batching.embed("late"))):
        with pytest.raises(EmbedderError, match="the embedder is closed"):
            await caller
    letters.gate.set()
    await closing
    await batching.close()
    assert letters.batches == [["running"]]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("embedder")]


async def test_a_caller_that_is_cancelled_does_not_take_others_along(letters, batching):
    letters.gate.clear()
    batching.start()
    leaver, stayer = (asyncio.create_task(batching.embed("x")) for _ in range(2))
    await until(lambda: letters.batches)
    leaver.cancel()
    letters.gate.set()
    assert np.array_equal(await stayer, letters_of("x"))
    assert leaver.cancelled()
    await batching.close()


async def test_before_start_there_is_an_error_and_no_waiting(batching):
    for call in (batching.ready, lambda: batching.embed("x")):
        with pytest.raises(EmbedderError, match=r"call start\(\) first"):
            await call()
    await batching.close()
