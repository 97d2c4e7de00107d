"""The real all-MiniLM-L6-v2, loaded once for the module; its libraries take some 20 seconds to import."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest

from empo2.memory import BatchingEmbedder, EmbedderError, SentenceEmbedder

TEXTS = [
    "Find a plant and put it in the red box. You are in the kitchen; there is a fridge.",
    "Find a plant and put it in the red box. You are in the kitchen; there is a closed fridge.",
    "The stock market fell by three percent after the central bank raised interest rates.",
    "",
    "a very long state " * 500,
]


@pytest.fixture(scope="module")
def minilm():
    return SentenceEmbedder("all-MiniLM-L6-v2", dtype="float32")


def test_importing_the_package_loads_no_model_library():
    code = "import sys, empo2.memory; print({'torch', 'sentence_transformers', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_embeddings_are_unit_float32(minilm):
    vectors = minilm.embed(TEXTS)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), minilm.dimension) == (len(TEXTS), 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)
    assert minilm.embed([]).shape == (0, 384)


def test_similar_sentences_are_more_similar(minilm):
    near, same, far = minilm.embed(TEXTS[:3])
    assert near @ same > 0.8 > 0.3 > near @ far


def test_bfloat16_keeps_the_direction(minilm):
    exact, rounded = minilm.embed(TEXTS), SentenceEmbedder("all-MiniLM-L6-v2", dtype="bfloat16").embed(TEXTS)
    assert np.linalg.norm(rounded, axis=1) == pytest.approx(1, abs=1e-6)
    assert np.vecdot(exact, rounded).min() > 0.999


def test_a_lone_surrogate_does_not_fail_its_batch(minilm):
    with_surrogate = minilm.embed([TEXTS[0], "half an emoji: \ud83d"])
    assert np.vecdot(with_surrogate[0], minilm.embed(TEXTS[:1])[0]) == pytest.approx(1, abs=1e-5)


def test_both_names_of_the_model_are_one(minilm):
    assert SentenceEmbedder("sentence-transformers/all-MiniLM-L6-v2").name == minilm.name == "all-MiniLM-L6-v2"


@pytest.mark.parametrize("changes", [{"model": "./no/such/model"}, {"device": "abacus"}, {"dtype": "float3"}])
def test_a_model_that_does_not_load_is_named_in_one_line(changes):
    with pytest.raises(EmbedderError) as failure:
        SentenceEmbedder(**({"model": "all-MiniLM-L6-v2"} | changes))
    assert next(iter(changes.values())) in str(failure.value)
    assert "give a Hugging Face name or a local path" in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.asyncio
async def test_minilm_behind_the_async_front(minilm):
    batching = BatchingEmbedder(lambda: minilm)
    batching.start()
    texts = [f"You are in room {i} and see a door." for i in range(20)]
    vectors = await asyncio.gather(*map(batching.embed, texts))
    await batching.close()
    for text, vector in zip(texts, vectors, strict=True):
        assert np.vecdot(vector, minilm.embed([text])[0]) == pytest.approx(1, abs=1e-5)
