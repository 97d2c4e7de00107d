"""The policy's tokenizer, used for the length of tips and for the special tokens that they must not contain."""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path

from tokenizers import Tokenizer

_CHARACTERS_PER_TOKEN = 3  # less than English has, so that the estimate is not too low


class EstimatedTokenizer:
    """Counts tokens by characters, and knows no special token: for a model whose tokenizer is not at hand."""

    special_tokens: Sequence[str] = ()

    def decoded(self, number: int) -> str:
        return f"token_id:{number}"

    def count(self, text: str) -> int:
        return -(-len(text) // _CHARACTERS_PER_TOKEN)


class PolicyTokenizer:
    """The tokenizer in a model's ``tokenizer.json``.

    Attributes:
        special_tokens: the tokens that the tokenizer adds to plain text, longest first.
        special_ids: of tokens that no plain text is made of, such as the end of a turn.

    Raises:
        OSError: the model has no ``tokenizer.json``, or the hub cannot be reached for it.
    """

    def __init__(self, model_path: str) -> None:
        file = Path(model_path) / "tokenizer.json"
        if not file.parent.is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(model_path, "tokenizer.json"))
        self._tokenizer = Tokenizer.from_str(file.read_text())
        self._encode = partial(self._tokenizer.encode, add_special_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        contents = {token.content for token in added.values() if token.content.strip()}
        self.special_tokens = sorted(contents, key=len, reverse=True)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        # The same tips are shown many times.
        self.count = lru_cache(maxsize=16_384)(lambda text: len(self._encode(text).ids))

    def decoded(self, number: int) -> str:
        return self._tokenizer.decode([number], skip_special_tokens=False)

    def text(self, ids: Iterable[int]) -> str:
        """Return the tokens as the vocabulary spells them, by which texts can be compared however they are cut."""
        return "".join(self._tokenizer.id_to_token(number) or f"<{number}>" for number in ids)

    def spelled(self, text: str) -> str:
        """Return a text as `text` has it."""
        return "".join(self._encode(text).tokens)


TipTokenizer = PolicyTokenizer | EstimatedTokenizer


def tokenizer_of(model_path: str, *, external: bool) -> TipTokenizer:
    """Return the model's tokenizer; an estimate for an external server's model that is not a local folder.

    Raises:
        OSError: as `PolicyTokenizer`.
    """
    return EstimatedTokenizer() if external and not Path(model_path).is_dir() else PolicyTokenizer(model_path)
