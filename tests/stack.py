"""What the tests of the whole stack share: how commands are run, and what a run leaves in its folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from empo2.recipe.files.models import resolve_model

CLI = [sys.executable, "-m", "empo2.recipe.cli"]
MODEL = "smollm2-135m-instruct"


def environment(**variables: str) -> dict[str, str]:
    """This process's variables, with which a process finds stack_agent.py, too."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def empo2(folder: Path, *arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. How long that takes is limited by the test's own timeout alone."""
    command = [*CLI, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may still be written


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The actor's weights in a checkpoint."""
    (shard,) = (run / "checkpoints" / f"global_step_{step}" / "actor").glob("model_world_size_1_rank_0.pt")
    weights = torch.load(shard, weights_only=False)
    return {
        name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight for name, weight in weights.items()
    }


def base_weights() -> dict[str, torch.Tensor]:
    return load_file(Path(resolve_model(MODEL)) / "model.safetensors")
