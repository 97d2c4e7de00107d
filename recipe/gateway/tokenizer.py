"""The policy's tokenizer, used for the length of tips and for the special tokens that they must not contain."""

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer


class PolicyTokenizer:
    """The tokenizer in a model's ``tokenizer.json``.

    Attributes:
        special_tokens: the tokens that the tokenizer adds to plain text, longest first.

    Raises:
        OSError: the model has no ``tokenizer.json``, or the hub cannot be reached for it.
    """

    def __init__(self, model_path: str) -> None:
        file = Path(model_path) / "tokenizer.json"
        if not file.parent.is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(model_path, "tokenizer.json"))
        self._tokenizer = Tokenizer.from_str(file.read_text())
        added = (token.content for token in self._tokenizer.get_added_tokens_decoder().values())
        self.special_tokens = sorted({token for token in added if token.strip()}, key=len, reverse=True)
        self.count = lru_cache(maxsize=16_384)(self._count)  # the same tips are shown many times

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
