"""Names of models, the small one's checkpoint made from its GGUF file, and exports of what was trained."""

import contextlib
import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from empo2.memory import MemoryStore
from empo2.recipe.cli.export import model_card
from empo2.recipe.cli.verbs import run
from empo2.recipe.config import load_settings
from empo2.recipe.files import checkpoints, models
from empo2.recipe.files.checkpoints import find_checkpoint, find_model
from empo2.recipe.files.models import SMOLLM2, resolve_model
from empo2.recipe.files.run_directory import write_settings
from empo2.recipe.run_folder import mark_complete
from empo2.recipe.trainer.manager import vocabulary_of

pytestmark = pytest.mark.slow

IM_START, IM_END = 1, 2  # SmolLM2's ids of <|im_start|> and <|im_end|>


def test_names(tmp_path, monkeypatch):
    assert resolve_model("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"  # of the hub
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = tmp_path / "empo2" / "models" / f"{SMOLLM2}-{models._REVISION}"
    built.mkdir(parents=True)
    assert resolve_model(SMOLLM2) == built
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        resolve_model("mine")
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert resolve_model("mine") == tmp_path / "mine"
    for name in ("/no/where", "runs/demo/nowhere"):
        with pytest.raises(FileNotFoundError, match=r"no such directory.*give an existing checkpoint"):
            resolve_model(name)
    with pytest.raises(FileNotFoundError, match=r"no LoRA in .*; small_model/README.md says how it is made"):
        models.verify(tmp_path)
    for name in models.ADAPTERS:
        own = models._adapter(name)
        models.verify(own)
        assert sum(path.stat().st_size for path in own.iterdir()) < 10_000_000


def test_an_interrupted_build_leaves_nothing_and_two_processes_may_build_at_once(tmp_path, monkeypatch):
    def interrupted(gguf: Path, target: Path) -> None:
        target.mkdir()
        raise KeyboardInterrupt

    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (tmp_path / target.name).mkdir()
        (tmp_path / target.name / "config.json").write_text("the other's, which was done first")

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(SMOLLM2, tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(models, "_convert", convert)
    built = Path(resolve_model(SMOLLM2, tmp_path))
    assert (built / "config.json").read_text().startswith("the other's")
    assert list(tmp_path.iterdir()) == [built], "the loser's directory is gone"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(resolve_model(SMOLLM2, tmp_path_factory.mktemp("models")))


def test_the_small_model_reads_chatml_and_answers(checkpoint):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (IM_START, IM_END, IM_END)
    assert tokenizer("a").input_ids == tokenizer.encode("a", add_special_tokens=False), "nothing is added"
    said = [("system", "one"), ("user", "two"), ("assistant", "three"), ("user", "What is the capital of France?")]
    chat = [{"role": role, "content": text} for role, text in said]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\none<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (ids.count(IM_START), ids.count(IM_END)) == (5, 4), "one id each"
    # This fails with the tokenizer that transformers 5.9 makes of this GGUF file.
    assert tokenizer.tokenize("2026") == ["2", "0", "2", "6"]
    for text in ("▁x  y", "don't , stop !", "naïve 日本語 🙂\n\n\tend "):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr(), "tied"
    assert model.generation_config.eos_token_id == IM_END
    question = tokenizer.apply_chat_template(chat[-1:], add_generation_prompt=True, return_dict=False)
    prompt = torch.tensor([question])
    reply = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(reply[0, prompt.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_the_model_of_notes_is_the_base_with_its_lora_merged(tmp_path, checkpoint, monkeypatch):
    """A LoRA with random weights on two layers, its checksums beside it; with others it is refused."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    layers: Any = {"target_modules": ["q_proj"], "layers_to_transform": [0, 29]}
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **layers)
    adapter = tmp_path / "adapter"
    get_peft_model(base, config).save_pretrained(adapter)
    sums = {name: hashlib.sha256((adapter / name).read_bytes()).hexdigest() for name in models.ADAPTER_FILES}
    (adapter / models.CHECKSUMS).write_text("".join(f"{checksum}  {name}\n" for name, checksum in sums.items()))
    monkeypatch.setattr(models, "_adapter", lambda name: adapter)
    monkeypatch.setattr(models, "_smollm2", lambda cache: Path(checkpoint))
    merged = resolve_model(models.NOTES, tmp_path / "cache")
    assert resolve_model(models.NOTES, tmp_path / "cache") == merged
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
    weights = adapter / "adapter_model.safetensors"
    assert models.verify(adapter) == hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: sha256 is [0-9a-f]{64}, SHA256SUMS says"):
        models.verify(adapter)


# Exports: a checkpoint as verl writes it becomes a folder that transformers and our commands load


@pytest.fixture(scope="module")
def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=49_152, tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def make_run(folder: Path, base: Any, steps: list[int], *settings: str) -> Path:
    """A run's folder with checkpoints, as verl's FSDP2 manager writes them on one worker."""
    from transformers import AutoTokenizer

    run = folder / "runs" / "mine"
    run.mkdir(parents=True)
    write_settings(load_settings("cpu", ["run.steps=4", "run.name=mine", *settings]), run)
    rows = [{"step": 2, "val/return": 12.5, "val/success_rate": 0.25}, {"step": 3}, {"step": 4, "val/return": 50.0}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    weights = base.state_dict()
    for step in steps:
        checkpoint = run / "checkpoints" / f"global_step_{step}"
        actor = checkpoint / "actor"
        actor.mkdir(parents=True)
        torch.save({name: weight * step for name, weight in weights.items()}, actor / "model_world_size_1_rank_0.pt")
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
        base.config.save_pretrained(actor / "huggingface")
        AutoTokenizer.from_pretrained(resolve_model(SMOLLM2)).save_pretrained(actor / "huggingface")
        with closing(MemoryStore(checkpoint / "memory.sqlite", embedder="all-MiniLM-L6-v2", dimension=384)):
            pass
        mark_complete(checkpoint)
    return run


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_an_exported_checkpoint_is_a_hugging_face_model(tmp_path: Path, base: Any, capsys: Any) -> None:
    from transformers import AutoTokenizer

    settings = ["algorithm.seed=7", "agent.env={OPENAI_API_KEY: sk-very-secret, ROOM: input.room}"]
    trained = make_run(tmp_path, base, [2, 4], *settings)
    target = tmp_path / "out" / "model"
    assert run(["export", str(trained), "--step", "2", "--memory", "--output", str(target)]) == (0, "")
    assert f"empo2 serve {target}" in capsys.readouterr().out

    found = weights_of(target)
    torch.testing.assert_close(found, {name: weight * 2 for name, weight in base.state_dict().items()}, rtol=0, atol=0)
    tokenizer, original = (AutoTokenizer.from_pretrained(folder) for folder in (target, resolve_model(SMOLLM2)))
    chat: Any = {"conversation": [{"role": "user", "content": "Where?"}], "tools": [{"name": "look"}]}
    assert tokenizer.apply_chat_template(**chat) == original.apply_chat_template(**chat)
    with closing(sqlite3.connect(target / "memory.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM tips").fetchone() == (0,)

    metadata, card = (target / "README.md").read_text().removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(metadata)["library_name"] == "transformers" and "base_model" not in metadata
    for said in ("mine", "2 of 4", SMOLLM2, "EMPO², all weights", "val/return 12.5, val/success_rate 0.25 (step 2)"):
        assert f"| {said} |" in card, card
    assert not [path for path in target.iterdir() if b"sk-very-secret" in path.read_bytes()]

    named = find_model(str(target), None)
    assert named.settings_file == target / "empo2.yaml" and named.memory == target / "memory.sqlite"
    assert load_settings(file=named.settings_file, overrides=["agent.env.OPENAI_API_KEY=x"]).algorithm.seed == 7
    code, message = run(["serve", str(target), "--memory"])  # needs no variables of the agent's
    assert code == 2 and message.endswith("memory.sqlite has no tips"), message


def test_the_last_checkpoint_without_its_memory_beside_the_run(tmp_path: Path, base: Any) -> None:
    trained = make_run(tmp_path, base, [2, 4], "model.path=Qwen/Qwen2.5-1.5B-Instruct")
    base.save_pretrained(trained / "checkpoints" / "global_step_4" / "merged")  # what is merged is not merged again
    assert run(["export", str(trained)]) == (0, "")
    target = tmp_path / "runs" / "mine-step-4"
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights_of(target)[name], base.state_dict()[name])
    assert not (target / "memory.sqlite").exists() and find_model(str(target), None).memory is None
    assert "base_model: Qwen/Qwen2.5-1.5B-Instruct" in (target / "README.md").read_text()
    code, message = run(["export", str(trained)])
    assert code == 2 and f"--output {target}: exists" in message


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    complete = folder / "checkpoints" / "global_step_3"
    complete.mkdir(parents=True)
    mark_complete(complete)
    write_settings(load_settings("cpu"), folder)
    copied = shutil.copytree(complete, tmp_path / "best")
    without = shutil.copytree(folder / "checkpoints", tmp_path / "other" / "checkpoints").parent
    with contextlib.chdir(complete):
        assert find_checkpoint(Path()) == complete
    for arguments, problem in (
        ([folder, "--step", "2"], "no checkpoint of step 2; there are those of 3"),
        ([complete, "--step", "2"], "--step 2: "),
        ([folder, "--memory"], "has none; algorithm.name=grpo trains without"),
        ([folder, "--output", tmp_path], "exists; give another folder"),
        ([tmp_path], "not a complete checkpoint, nor a run's folder"),
        ([without], f"RUN {without / 'config.yaml'}: No such file or directory"),
        ([copied], "a checkpoint's folder keeps its name, global_step_N"),
    ):
        code, message = run(["export", *map(str, arguments)])
        assert code == 2 and problem in message, message


def test_a_model_card_names_the_advantage_of_another_paper(tmp_path: Path) -> None:
    settings = load_settings("cpu", ["algorithm.name=grpo", "algorithm.advantage=gigpo"]).to_dict()
    card = model_card(tmp_path / "checkpoints" / "global_step_1", settings, memory=False)
    assert "| trained | GRPO with algorithm.advantage=gigpo, all weights |" in card


def test_a_model_of_the_hub_is_found_where_huggingface_hub_keeps_it(tmp_path: Path) -> None:
    """Also by the older one of its variables."""
    for name, kept in (("HF_HOME", tmp_path / "hub"), ("HUGGINGFACE_HUB_CACHE", tmp_path)):
        snapshot = kept / "models--a--b" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        code = "from empo2.recipe.files.models import files_of; print(files_of('a/b'))"
        given = {"HOME": "/nowhere", name: str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
        assert done.stdout == f"{snapshot}\n", done.stderr


def test_a_checkpoint_keeps_what_its_lora_learned_in_small_steps(tmp_path: Path, monkeypatch: Any) -> None:
    """As vLLM had it in training: the nearest values of bfloat16 have a tenth of it (test_rounding.py)."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32))
    model = model.to(torch.bfloat16)
    actor = tmp_path / "of verl's merger"
    model.save_pretrained(str(actor))
    AutoTokenizer.from_pretrained(resolve_model(SMOLLM2)).save_pretrained(actor)
    before = load_file(actor / "model.safetensors")
    lora = get_peft_model(model, LoraConfig(r=64, lora_alpha=64, target_modules=["down_proj"]))
    (up,) = (weight for name, weight in lora.named_parameters() if "lora_B" in name)
    up.data = 5e-5 * torch.randn(up.shape).sign()
    lora.save_pretrained(str(actor / "lora_adapter"))
    learned = load_file(actor / "lora_adapter" / "adapter_model.safetensors")
    down, up = (next(weight for name, weight in learned.items() if half in name) for half in ("lora_A", "lora_B"))

    def merging(command: list[str], **_: Any) -> SimpleNamespace:
        shutil.copytree(actor, command[-1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(checkpoints.subprocess, "run", merging)
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_2"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr(checkpoints, "fast_dtype", lambda: "float32")
    for device, dtype, tolerance in (("gpu", "bfloat16", 0.1), ("cpu", "float32", 1e-3)):  # on which it was trained
        (tmp_path / "run" / "config.yaml").write_text(f"hardware: {{device: {device}}}")
        after = load_file(checkpoints.merged(checkpoint) / "model.safetensors")
        name = "model.layers.0.mlp.down_proj.weight"
        assert after[name].dtype == getattr(torch, dtype)
        exact, found = up @ down, after[name].float() - before[name].float()
        assert float((found * exact).sum() / exact.square().sum()) == pytest.approx(1, abs=tolerance)
        assert all(torch.equal(after[each].to(before[each].dtype), before[each]) for each in before.keys() - {name})
        shutil.rmtree(checkpoint / "merged")


@pytest.mark.parametrize("nested", [False, True])
def test_the_vocabulary_is_that_of_the_class_where_a_config_does_not_say(tmp_path: Path, nested: bool) -> None:
    written: dict[str, Any] = {"model_type": "llama", "vocab_size": 77}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert vocabulary_of(str(tmp_path)) == 77
    other = tmp_path / "other"
    other.mkdir()
    written = (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}} if nested else {"model_type": "llama"}
    )
    (other / "config.json").write_text(json.dumps(written))
    assert vocabulary_of(str(other)) == (262_208 if nested else 32_000)
