"""What the gateway says of an embedder that cannot tell states apart, with the real all-MiniLM-L6-v2."""

from collections.abc import Iterator

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from empo2.memory import SentenceEmbedder
from empo2.recipe.gateway.told_apart import Watched, trouble
from empo2.recipe.retrofit.states import embedder_trouble

CONFIRM, CANCEL = "请点击确认按钮。", "请点击取消按钮。"


@pytest.fixture(scope="module")
def minilm() -> SentenceEmbedder:
    return SentenceEmbedder("all-MiniLM-L6-v2")


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def warnings(watched: Watched, *texts: str) -> list[str]:
    with capture_logs() as logged:
        keys = [watched.embed([text])[0] for text in texts]
    assert all(np.allclose(key, watched.embed([text])[0], atol=1e-2) for text, key in zip(texts, keys, strict=True))
    return [line["event"] for line in logged if line["log_level"] == "warning"]


def test_a_text_of_unknown_pieces_is_warned_of_once(minilm: SentenceEmbedder):
    confirm, cancel = minilm.embed([CONFIRM, CANCEL])
    assert confirm @ cancel > 0.9999 and min(map(minilm.unknown, (CONFIRM, CANCEL))) > 0.5
    (line,) = warnings(Watched(minilm), "a dark room", CONFIRM, CANCEL)
    assert (
        "memory.embedder=all-MiniLM-L6-v2 does not know most of the word pieces of a state" in line
        and "docs/states.md" in line
    )


def test_unequal_texts_with_one_key_are_warned_of(minilm: SentenceEmbedder):
    long = "a very long state " * 100  # beyond what the embedder reads
    (line,) = warnings(Watched(minilm), long + "with a lamp", "a room", long + "with a key")
    assert "gives unequal states one key" in line and "lamp" not in line  # the log never has an agent's text


def test_english_states_are_not_warned_of(minilm: SentenceEmbedder):
    assert [minilm.unknown(text) for text in ("a dark room with a lamp", "", "a \ud800 b")] == [0, 0, 0]
    rooms = [f"You are in the {room}. The {thing} is {how}." for room in ("kitchen", "hall", "art studio")
             for thing in ("door", "drain", "red box") for how in ("open", "closed")]  # fmt: skip
    assert warnings(Watched(minilm), *rooms, *(f"  {room.upper()}\n" for room in rooms)) == []


def test_init_says_it_of_an_episodes_states(minilm: SentenceEmbedder):
    """Loading takes seconds, so states in plain English letters are not looked at."""
    assert "does not know most of the word pieces" in trouble(minilm, [CONFIRM, CANCEL])
    assert trouble(minilm, ["a dark room", "a lit room"]) == "" == embedder_trouble(["a dark room"], "no-such-model")
    assert "does not know most" in embedder_trouble([CONFIRM], "all-MiniLM-L6-v2")
