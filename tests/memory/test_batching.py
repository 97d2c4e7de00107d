"""The async front: right vectors, urgent texts first, and an error for everyone when there is none."""

import asyncio
import os
import threading
from itertools import chain

import numpy as np
import pytest

from empo2.memory import BatchingEmbedder, EmbedderError
from empo2.memory.batching import BACKGROUND_NICENESS, cpu_threads

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


def letters_of(text):
    counts = np.array([1 + text.count(chr(97 + i)) for i in range(26)], np.float32)
    return counts / np.linalg.norm(counts)


class Letters:
    """Embeds a text as its letter counts; keeps the batches it was given, each of which waits at its kind's gate."""

    name, dimension = "letters", 26

    def __init__(self):
        self.urgent, self.background = [], []
        self.gates = {True: threading.Event(), False: threading.Event()}
        self.niceness, self.failing = set(), ""
        self.open()

    def open(self, *kinds):
        for urgent in kinds or (True, False):
            self.gates[urgent].set()

    def shut(self):
        for gate in self.gates.values():
            gate.clear()

    def batches(self, urgent):
        return self.urgent if urgent else self.background

    def embed(self, texts):
        thread = threading.current_thread().name
        assert thread.startswith("embedder")
        urgent = not thread.startswith("embedder-background")
        self.niceness.add((urgent, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        self.batches(urgent).append(list(texts))
        self.gates[urgent].wait()
        if self.failing and self.failing in texts:
            raise RuntimeError("out of ink")
        return np.array([letters_of(text) for text in texts])


@pytest.fixture
def letters():
    letters = Letters()
    yield letters
    letters.open()  # a failed test shall not leave a thread at a gate, for which the interpreter would wait


@pytest.fixture
async def batching(letters):
    batching = BatchingEmbedder(letters)
    yield batching
    await batching.close()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def asked(*calls):
    """Tasks of the calls, which have come as far as they get by themselves."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("threads", [1, 3])
async def test_many_callers_get_their_own_vectors_and_only_background_threads_are_nice(letters, threads):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    batching = BatchingEmbedder(letters, threads=threads)
    texts = [chr(97 + i % 26) * (1 + i // 26) for i in range(128)]
    vectors = await asyncio.gather(*(batching.embed(text, urgent=i % 4 == 0) for i, text in enumerate(texts)))
    await batching.close()
    for text, vector in zip(texts, vectors, strict=True):
        assert np.array_equal(vector, letters_of(text))
    assert sorted(chain.from_iterable(letters.urgent)) == sorted(texts[::4])
    assert sorted(chain.from_iterable(letters.background)) == sorted(text for i, text in enumerate(texts) if i % 4)
    assert letters.niceness == {(True, before), (False, max(before, BACKGROUND_NICENESS))}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


async def test_urgent_texts_go_one_by_one_and_others_in_batches_the_oldest_first(letters, batching):
    letters.shut()
    calls = await asked(batching.embed("first", urgent=True), batching.embed("other", urgent=False))
    await until(lambda: letters.urgent and letters.background)
    calls += await asked(*(batching.embed(text, urgent=False) for text in "abcdef"))
    calls += await asked(*(batching.embed(text, urgent=True) for text in "bu"), batching.embed("b", urgent=False))
    letters.open(True)
    vectors = await asyncio.gather(
        calls[3], calls[-3], calls[-1]
    )  # of "b", which moved up: the background stands still
    letters.open()
    await asyncio.gather(*calls)
    assert all(np.array_equal(vector, letters_of("b")) for vector in vectors)
    assert letters.urgent == [["first"], ["b"], ["u"]]
    assert letters.background == [["other"], ["a", "c", "d", "e"], ["f"]]


@pytest.mark.parametrize("urgent", [True, False])
@pytest.mark.parametrize(
    ("options", "running", "batches"),
    [
        # One thread for all rollouts without tips could not keep up with the states of 128 agents.
        ({"threads": 3}, 3, [1, 1, 1, 1]),
        ({"accelerated": True}, 1, [1, 32, 8]),
    ],
)
async def test_batches_of_a_kind_and_the_threads_that_embed_them(letters, urgent, options, running, batches):
    """As many texts as there are threads come one after the other, the rest at once."""
    letters.shut()
    batching, calls = BatchingEmbedder(letters, **options), []
    for i in range(running):
        calls += await asked(batching.embed(f"first {i}", urgent=urgent))
        await until(lambda text=f"first {i}": [text] in letters.batches(urgent))
    calls += await asked(*(batching.embed(f"{i}", urgent=urgent) for i in range(sum(batches) - running)))
    letters.open()
    await asyncio.gather(*calls)
    await batching.close()
    assert [len(batch) for batch in letters.batches(urgent)] == batches


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (16, 4), (96, 8)])
async def test_the_machines_cores_say_how_many_threads_embed(monkeypatch, cores, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert cpu_threads() == threads


@pytest.mark.parametrize("urgent", [True, False])
async def test_a_text_is_embedded_once(letters, batching, urgent):
    letters.shut()
    waiting = await asked(*(batching.embed("x", urgent=urgent) for _ in range(3)))
    await until(lambda: letters.batches(urgent))
    waiting += await asked(*(batching.embed("x", urgent=urgent) for urgent in (True, False)))  # in flight by now
    letters.open()
    vectors = [*await asyncio.gather(*waiting)]
    vectors += [await batching.embed("x", urgent=urgent) for urgent in (True, False)]  # from the recent ones
    assert letters.urgent + letters.background == [["x"]]
    assert all(vector is vectors[0] for vector in vectors)
    with pytest.raises(ValueError, match="read-only"):
        vectors[0][0] = 1


async def test_only_texts_not_asked_for_lately_are_forgotten(letters, batching, monkeypatch):
    monkeypatch.setattr("empo2.memory.batching.RECENT_TEXTS", 3)
    for text in ("kept", "forgotten", "kept", "a", "b", "kept", "forgotten"):
        await batching.embed(text, urgent=True)
    assert letters.urgent == [["kept"], ["forgotten"], ["a"], ["b"], ["forgotten"]]


async def test_a_failed_batch_fails_its_own_callers_and_the_next_call_tries_again(letters, batching):
    letters.shut()
    letters.failing = "a"
    failing = await asked(*(batching.embed(text, urgent=False) for text in "aab"))
    [other] = await asked(batching.embed("c", urgent=True))
    letters.open()
    failed = await asyncio.gather(*failing, return_exceptions=True)
    assert [str(outcome) for outcome in failed] == ["an embedding failed: RuntimeError"] * 3
    assert all(isinstance(outcome, EmbedderError) for outcome in failed)
    assert np.array_equal(await other, letters_of("c"))
    letters.failing = ""
    assert np.array_equal(await batching.embed("a", urgent=False), letters_of("a"))
    letters.embed = lambda texts: np.ones((len(texts) + 1, 26))  # not one row for each text
    with pytest.raises(EmbedderError, match="ValueError"):
        await batching.embed("d", urgent=False)


async def test_closing_fails_who_waits_and_ends_the_threads(letters, batching):
    letters.shut()
    calls = await asked(batching.embed("running", urgent=True), batching.embed("there too", urgent=False))
    await until(lambda: letters.urgent and letters.background)
    calls += await asked(batching.embed("waiting", urgent=True), batching.embed("waits too", urgent=False))
    closing = asyncio.create_task(batching.close())
    for caller in (*calls, asyncio.create_task(batching.embed("late", urgent=True))):
        with pytest.raises(EmbedderError, match="the embedder is closed"):
            await caller
    letters.open()
    await closing
    await batching.close()
    assert (letters.urgent, letters.background) == ([["running"]], [["there too"]])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("embedder")]


async def test_a_caller_that_is_cancelled_does_not_take_others_along(letters, batching):
    letters.shut()
    leaver, stayer = await asked(*(batching.embed("x", urgent=urgent) for urgent in (True, False)))
    await until(lambda: letters.urgent)
    leaver.cancel()
    letters.open()
    assert np.array_equal(await stayer, letters_of("x"))
    assert leaver.cancelled()
