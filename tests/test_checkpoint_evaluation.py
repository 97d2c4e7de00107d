"""The real stack: a checkpoint, evaluated without a trainer, plays as it did when its step was validated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from empo2.recipe.evaluation.episode_results import read_results

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1500)]

CLI = [sys.executable, "-m", "empo2.recipe.cli"]


def empo2(folder: Path, *arguments: str) -> None:
    done = subprocess.run([*CLI, *arguments], cwd=folder, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_evaluation_of_a_checkpoint_equals_the_validation_of_its_step(tmp_path: Path) -> None:
    """Two tasks at temperature 0, one episode after the other: a batch of another size may round a tie otherwise."""
    settings = [
        "run.name=test",
        "run.steps=1",
        "run.save_every=1",
        "run.validate_first=false",
        "run.validate_samples=1",
        "model.val_temperature=0",
        "agent.concurrency=1",
        "algorithm.learning_rate=1e-4",  # the trained weights must not play as the base model does
        "tasks.args={names: [find-animal], actions: choice, choices: 6, max_steps: 6, train_variations: 2, "
        "test_variations: 2}",
    ]
    empo2(tmp_path, "train", "--profile", "cpu", *settings)
    run = tmp_path / "runs" / "test"
    rows = json.loads((run / "tasks.json").read_text())["val"]
    assert len(rows) == 2
    panel = {"description": "The run's validation tasks.", "group": [], "config": {}, "common": {}, "rows": rows}
    (tmp_path / "panel.json").write_text(json.dumps(panel))
    out = tmp_path / "out"
    empo2(tmp_path, "eval", str(run), "--panel", str(tmp_path / "panel.json"), "--samples", "1", "--output", str(out))
    results = read_results(out)
    assert [result.failed for result in results] == [None, None]
    validated = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert validated["val/n_rollouts"] == 2
    returns = [result.return_ for result in results if result.return_ is not None]
    assert sum(returns) / len(returns) == pytest.approx(validated["val/return"])
