"""Names of models, and the small one's checkpoint made from its GGUF file."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.launcher import model_files
from empo2.recipe.launcher.model_files import SMOLLM2, resolve_model

IM_START, IM_END, NEWLINE = 1, 2, 198  # SmolLM2's ids of <|im_start|>, <|im_end|>, "\n"
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def test_names(tmp_path, monkeypatch):
    assert resolve_model("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"  # of the hub
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = tmp_path / "empo2" / "models" / f"{SMOLLM2}-{model_files._REVISION}"
    built.mkdir(parents=True)
    assert resolve_model(SMOLLM2) == built
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        resolve_model("mine")
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert resolve_model("mine") == tmp_path / "mine"
    for name in ("/no/where", "./nowhere", "~/nowhere", "runs/demo/nowhere"):
        with pytest.raises(FileNotFoundError, match=r"no such directory.*give an existing checkpoint"):
            resolve_model(name)
    with pytest.raises(FileNotFoundError, match=r"smollm2-135m-notes: no LoRA in .*; make it with `make small-model`"):
        model_files.verify(tmp_path)


def test_an_interrupted_build_leaves_nothing_and_two_processes_may_build_at_once(tmp_path, monkeypatch):
    def interrupted(gguf: Path, target: Path) -> None:
        target.mkdir()
        raise KeyboardInterrupt

    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (tmp_path / target.name).mkdir()
        (tmp_path / target.name / "config.json").write_text("the other's, which was done first")

    monkeypatch.setattr(model_files, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(SMOLLM2, tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(model_files, "_convert", convert)
    built = Path(resolve_model(SMOLLM2, tmp_path))
    assert (built / "config.json").read_text().startswith("the other's")
    assert list(tmp_path.iterdir()) == [built], "the loser's directory is gone"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(resolve_model(SMOLLM2, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def render(tokenizer, messages: list[dict], answer_next: bool = False) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=answer_next, return_dict=False)


def test_a_chat_is_chatml_and_every_turn_is_in_it(tokenizer):
    said = [("system", "one"), ("user", "two"), ("assistant", "three"), ("user", "four")]
    turns = [{"role": role, "content": text} for role, text in said]
    ids = render(tokenizer, turns, answer_next=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (IM_START, IM_END, IM_END)
    assert tokenizer("a").input_ids == tokenizer.encode("a", add_special_tokens=False), "nothing is added"
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\none<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(IM_START), ids.count(IM_END)) == (5, 4), "one id each"


def test_numbers_are_split_into_digits_and_every_text_survives(tokenizer):
    """Both fail with the tokenizer that transformers 5.9 makes of this GGUF file."""
    assert tokenizer.tokenize("2026") == ["2", "0", "2", "6"]
    for text in ("▁x  y", "don't , stop !", "naïve 日本語 🙂\n\n\tend "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_greedy_reply(checkpoint, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr(), "tied"
    assert model.generation_config.eos_token_id == IM_END
    prompt = torch.tensor([render(tokenizer, [QUESTION], answer_next=True)])
    reply = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(reply[0, prompt.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.fixture
def adapter(tmp_path, checkpoint) -> Path:
    """A LoRA with random weights on two layers, its checksums beside it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    layers: Any = {"target_modules": ["q_proj"], "layers_to_transform": [0, 29]}
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **layers)
    folder = tmp_path / "adapter"
    get_peft_model(base, config).save_pretrained(folder)
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in model_files.ADAPTER_FILES}
    (folder / model_files.CHECKSUMS).write_text("".join(f"{checksum}  {name}\n" for name, checksum in sums.items()))
    return folder


def test_the_model_of_notes_is_the_base_with_its_lora_merged(tmp_path, adapter, checkpoint, monkeypatch):
    import torch
    from safetensors.torch import load_file

    monkeypatch.setattr(model_files, "_adapter", lambda: adapter)
    monkeypatch.setattr(model_files, "_smollm2", lambda cache: Path(checkpoint))
    merged = resolve_model(model_files.NOTES, tmp_path / "cache")
    assert resolve_model(model_files.NOTES, tmp_path / "cache") == merged
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (checkpoint, merged))
    lora = load_file(adapter / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 29)}
    for name in changed:
        down, up = (lora[f"base_model.model.{name.replace('weight', f'lora_{half}.weight')}"].float() for half in "AB")
        expected = before[name].float() + 8 / 4 * up @ down
        assert torch.equal(after[name], expected.bfloat16())
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (Path(merged) / name).read_bytes() == (Path(checkpoint) / name).read_bytes()


def test_a_lora_that_is_not_the_one_of_the_checksum_is_refused(adapter):
    weights = adapter / "adapter_model.safetensors"
    assert model_files.verify(adapter) == hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: sha256 is [0-9a-f]{64}, SHA256SUMS says"):
        model_files.verify(adapter)
    (adapter / model_files.CHECKSUMS).write_text("")
    with pytest.raises(ValueError, match=r"adapter_config\.json: sha256 is .* SHA256SUMS says None"):
        model_files.verify(adapter)


def test_the_lora_of_this_repository_is_whole_and_small():
    folder = model_files._adapter()
    model_files.verify(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10_000_000
