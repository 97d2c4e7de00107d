"""``empo2 export``: a checkpoint as verl writes it becomes a folder that transformers and our commands load."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from empo2.memory import MemoryStore
from empo2.recipe.cli.verbs import run
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.checkpoints import find_model
from empo2.recipe.launcher.model_files import SMOLLM2, resolve_model
from empo2.recipe.launcher.run_directory import write_settings
from empo2.recipe.run_folder import mark_complete

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


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
    assert {*found} == {*base.state_dict()}
    assert all(torch.equal(found[name], weight * 2) for name, weight in base.state_dict().items())
    tokenizer, original = (AutoTokenizer.from_pretrained(folder) for folder in (target, resolve_model(SMOLLM2)))
    tools = [{"name": "look"}]
    assert tokenizer.apply_chat_template(CHAT, tools=tools) == original.apply_chat_template(CHAT, tools=tools)
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
    """What was merged once is not merged again."""
    trained = make_run(tmp_path, base, [2, 4], "model.path=Qwen/Qwen2.5-1.5B-Instruct")
    base.save_pretrained(trained / "checkpoints" / "global_step_4" / "merged")
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
    for arguments, problem in (
        (["--step", "2"], "no checkpoint of step 2; there are those of 3"),
        (["--memory"], "has none; algorithm.name=grpo trains without"),
        (["--output", str(tmp_path)], "exists; give another folder"),
    ):
        code, message = run(["export", str(folder), *arguments])
        assert code == 2 and problem in message, message
    code, message = run(["export", str(tmp_path)])
    assert code == 2 and "not a complete checkpoint, nor a run's folder" in message
