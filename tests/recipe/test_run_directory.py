"""A run's folder: new, refused, continued, and never overwritten."""

import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from empo2.memory import MemoryStore, Step
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files import run_directory
from empo2.recipe.files.run_directory import last_set_aside, open_run_directory, put_memory, write_settings
from empo2.recipe.rollout_log import read_rollouts, write_rollouts
from empo2.recipe.run_folder import damage_of, last_checkpoint, mark_complete, remove_old_checkpoints


def settings_in(tmp_path: Path, *overrides: str) -> Settings:
    return load_settings("cpu", [f"run.directory={tmp_path}", *overrides])


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def config_of(run: Path) -> Any:
    return yaml.safe_load((run / "config.yaml").read_text())


def checkpoint(directory: Path, step: int, *, complete: bool = True) -> Path:
    folder = directory / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model_world_size_1_rank_0.pt").touch()
    if complete:
        mark_complete(folder)
    return folder


def begun(tmp_path: Path, steps: int) -> Path:
    """A run that was killed after some steps, as another process leaves it: every step saved but the last."""
    run = tmp_path / "a"
    run.mkdir()
    write_settings(settings_in(tmp_path, "run.name=a"), run)
    lines = [json.dumps({"step": step, "training/return": 10.0 * step}) + "\n" for step in range(steps + 1)]
    (run / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "trai')
    (run / "episodes.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
    for name in ("trainer.log", "memory.sqlite", "memory.sqlite-wal", "tasks.json"):
        (run / name).write_text(f"{name} of the first time")
    for step in range(steps + 1):
        for phase in ("training", "validation") if step else ("validation",):
            write_rollouts(run / "rollouts", [{"rollout": f"{phase[0]}{step}", "step": step, "phase": phase}], "all")
    for step in range(1, steps):
        checkpoint(run / "checkpoints", step)
    checkpoint(run / "checkpoints", steps, complete=False)
    return run


def test_a_new_run_has_its_settings_and_is_its_processs_alone(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, "run.name=a", "run.resume=auto")
    run, resumed = open_run_directory(settings, "cpu")
    assert (run, resumed) == (tmp_path / "a", None)
    assert load_settings(file=run / "config.yaml").run.name == "a"
    with pytest.raises(ConfigError, match=r"run.name='a': another process is training"):
        open_run_directory(settings, "cpu")
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_a_run_goes_on_from_its_last_complete_checkpoint(tmp_path: Path) -> None:
    run = begun(tmp_path, 3)
    settings = settings_in(tmp_path, "run.name=a", "run.resume=auto", "run.steps=7", "run.save_every=5")
    assert open_run_directory(settings, "cpu") == (run, run / "checkpoints" / "global_step_2")
    assert steps_of(run) == [0, 1, 2]
    assert [each.id for each in read_rollouts(run / "rollouts")] == ["v0", "t1", "v1", "t2", "v2"]
    assert [each.id for each in read_rollouts(run / "set-aside-1" / "rollouts")] == ["t3", "v3"]
    assert config_of(run)["run"]["steps"] == 7
    aside = run / "set-aside-1"
    assert (aside / "trainer.log").read_text() == "trainer.log of the first time"
    assert (aside / "memory.sqlite-wal").exists() and (aside / "memory.sqlite").exists()
    assert config_of(aside)["run"]["steps"] == 6
    assert (aside / "metrics.jsonl").read_text().endswith('"trai')
    assert (run / "episodes.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_what_is_set_aside_has_a_new_name_each_time(tmp_path: Path) -> None:
    """Also where the user has removed an earlier folder."""
    run = begun(tmp_path, 3)
    for number in (2, 9):
        (run / f"set-aside-{number}").mkdir()
    open_run_directory(settings_in(tmp_path, "run.name=a", "run.resume=auto"), "cpu")
    assert (run / "set-aside-10" / "trainer.log").exists()


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    run = begun(tmp_path, 1)
    assert open_run_directory(settings_in(tmp_path, "run.name=a", "run.resume=auto"), "cpu") == (run, None)
    assert steps_of(run) == [0]
    assert not (run / "memory.sqlite").exists()
    assert read_rollouts(run / "rollouts") == []


def test_the_name_of_a_start_that_failed_is_free_unless_it_has_a_checkpoint(tmp_path: Path) -> None:
    """What it logged can still be read; settings that a run may not change may be others."""
    (tmp_path / "b").mkdir()
    assert open_run_directory(settings_in(tmp_path, "run.name=b"), "cpu") == (tmp_path / "b", None)
    run = begun(tmp_path, 1)
    (run / "metrics.jsonl").write_text('{"step": 0, "val')
    settings = settings_in(tmp_path, "run.name=a", "memory.scope=[task]")
    assert open_run_directory(settings, "cpu") == (run, None)
    assert config_of(run)["memory"]["scope"] == ["task"]
    assert last_set_aside(run) == run / "set-aside-1"
    assert (run / "set-aside-1/trainer.log").read_text() == "trainer.log of the first time"
    assert not {path.name for path in run.iterdir()} & {"trainer.log", "memory.sqlite", "tasks.json"}
    checkpoint(run / "checkpoints", 2)
    with pytest.raises(ConfigError, match=r"run.name='a': .*a exists"):
        open_run_directory(settings, "cpu")
    assert last_set_aside(run) == run / "set-aside-1"


AGAIN = ("run.name=a", "run.resume=auto")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.name=a"], "run.name='a': .*a exists; .*run.resume=auto"),
        (["run.resume=auto"], "run.resume='auto': give run.name"),
        ([*AGAIN, "run.steps=2"], "run.steps=2: the run 'a' has done 2 already; give more"),
        ([*AGAIN, "model.path=other"], "model.path='other': the run 'a' began with 'smollm2"),
        ([*AGAIN, "algorithm.name=grpo"], "algorithm.name='grpo': .* began with 'empo2'"),
        ([*AGAIN, "memory.scope=[task]"], r"memory.scope=\['task'\]"),
        ([*AGAIN, "memory.embedder=other"], "memory.embedder='other'"),
        ([*AGAIN, "model.lora_alpha=3"], "model.lora_alpha=3: the run 'a' began with 64"),
        ([*AGAIN, "hardware.gpus_per_node=2"], "nodes=1, hardware.gpus_per_node=2: 2 GPUs; .*step_2 is of 1; give as"),
        (["run.name=b", "memory.from=/nowhere"], "memory.from='/nowhere': .*/nowhere"),
        (["run.name=results"], "run.name='results': .*results exists"),
        (["run.name=thesis", "run.resume=auto"], "run.name='thesis': .* is not the folder of a run"),
    ],
)
def test_refused_without_a_change(tmp_path: Path, overrides: list[str], words: str) -> None:
    begun(tmp_path, 3)
    (tmp_path / "results").mkdir()  # of `empo2 eval`, which leaves settings, too
    for name in ("evaluation.json", "config.yaml"):
        (tmp_path / "results" / name).write_text("{}")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=words) as refusal:
        open_run_directory(settings_in(tmp_path, *overrides), "cpu")
    assert "\n" not in str(refusal.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_memory_can_start_from_another_runs_of_the_same_embedder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    key = np.eye(384, dtype=np.float32)[0]
    of: Any = {"embedder": "all-MiniLM-L6-v2", "dimension": 384}
    with closing(MemoryStore(tmp_path / "other" / "memory.sqlite", **of)) as store:
        store.add_episode("task", "e", tip="a tip", score=3, success=False, steps=[Step("state", key, "go")])
        settings = settings_in(tmp_path, "run.name=a", f"memory.from={tmp_path / 'other'}")
        (tmp_path / "other" / "memory.npz").write_bytes(b"learned")  # by `algorithm.novelty: rnd`
        run, _ = open_run_directory(settings, "cpu")
        assert store.size() == 1 and (run / "memory.npz").read_bytes() == b"learned"
    with closing(MemoryStore(run / "memory.sqlite", **of)) as store:
        assert store.size() == 1
    other = tmp_path / "of_another_embedder.sqlite"
    MemoryStore(other, embedder="other", dimension=8).close()
    with pytest.raises(ConfigError, match=r"memory.from=.*embedder 'other'.*memory.embedder='all-MiniLM-L6-v2'"):
        open_run_directory(settings_in(tmp_path, "run.name=b", f"memory.from={other}"), "cpu")
    assert not (tmp_path / "b").exists()


def test_a_memory_is_not_replaced_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "memory.sqlite"
    MemoryStore(file, embedder="any", dimension=8).close()
    with pytest.raises(ConfigError, match=r"--memory-from .*: is in the folder of the results"):
        put_memory(file, tmp_path)
    (tmp_path / "other").mkdir()
    for source in (file, file, None):
        put_memory(source, tmp_path / "other")
        assert (tmp_path / "other/memory.sqlite").exists() == (source is not None)
    assert file.exists()


def test_checkpoints_are_the_latest_complete_ones(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (2, 9, 10):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 11, complete=False)
    own = [
        shutil.copytree(tmp_path / "global_step_10", tmp_path / f"global_step_10{name}") for name in ("-best", "_hf")
    ]
    assert last_checkpoint(tmp_path) == tmp_path / "global_step_10"
    remove_old_checkpoints(tmp_path, keep=2)
    assert {*tmp_path.iterdir()} == {tmp_path / "global_step_10", tmp_path / "global_step_9", *own}


def test_what_a_killed_process_left_of_a_mark_is_no_file_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("of the step that is done again")
    (tmp_path / ".complete").write_text('{"wei')
    mark_complete(tmp_path)
    assert damage_of(tmp_path) == "" and sorted(path.name for path in tmp_path.iterdir()) == ["complete", "weights"]


def damaged(folder: Path, how: str) -> None:
    shard = folder / "actor" / "model_world_size_1_rank_0.pt"
    torch.save({"weight": torch.arange(1000.0)}, shard)
    with closing(MemoryStore(folder / "memory.sqlite", embedder="e", dimension=2)):
        pass
    mark_complete(folder)
    content = bytearray(shard.read_bytes())
    match how:
        case "cut":
            shard.write_bytes(content[:2000])
        case "empty":
            shard.write_bytes(b"")
        case "absent":
            shard.unlink()
        case "a bit":
            content[len(content) // 2] ^= 1
            shard.write_bytes(content)
        case "memory":
            (folder / "memory.sqlite").write_bytes(b"x" * (folder / "memory.sqlite").stat().st_size)
        case "mark":
            (folder / "complete").write_text('{"actor/model')


@pytest.mark.parametrize("how", ["cut", "empty", "absent", "a bit", "memory", "mark"])
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is advised works: the folder is removed, and the same command goes on from the one before."""
    run = begun(tmp_path, 4)  # complete are 1, 2 and 3
    last = run / "checkpoints/global_step_3"
    damaged(last, how)
    settings = settings_in(tmp_path, "run.name=a", "run.resume=auto", "run.steps=9")
    with pytest.raises(ConfigError) as refusal:
        open_run_directory(settings, "cpu")
    said, named = str(refusal.value), {"memory": "memory.sqlite", "mark": "complete cannot be read"}
    assert said.startswith("run.resume='auto': ") and named.get(how, "rank_0.pt") in said
    assert said.endswith(f"remove {last}, and the same command continues after step 2")
    shutil.rmtree(last)
    monkeypatch.setattr(run_directory, "_lock", lambda folder: os.open(folder, os.O_RDONLY))  # this process has it
    assert open_run_directory(settings, "cpu")[1] == run / "checkpoints/global_step_2"


def test_a_whole_checkpoint_is_taken_and_damage_of_all_is_said(tmp_path: Path) -> None:
    run = begun(tmp_path, 3)
    settings = settings_in(tmp_path, "run.name=a", "run.resume=auto", "run.steps=9")
    one, two = (run / f"checkpoints/global_step_{step}" for step in (1, 2))
    damaged(one, "a bit")
    damaged(two, "not")
    assert damage_of(two) == ""
    damaged(two, "cut")
    with pytest.raises(ConfigError, match=f"remove {two} and {one}, and the same command starts over"):
        open_run_directory(settings, "cpu")


@pytest.mark.parametrize("name", [".", "..", "...", ".hidden", "-x", "a/b", ""])
def test_a_name_that_is_no_folders_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        settings_in(tmp_path, f"run.name='{name}'")
