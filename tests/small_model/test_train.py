"""A training of the LoRA that is killed goes on where it was, to the same weights."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from empo2.small_model.train import STATE

pytestmark = [pytest.mark.rare, pytest.mark.timeout(1800)]

SCRIPT = """
import random, sys
from pathlib import Path
from transformers import AutoTokenizer
from empo2.recipe.files.models import SMOLLM2, resolve_model
from empo2.small_model import failures
from empo2.small_model.make import ADAPTER, reflections
from empo2.small_model.train import Settings, encode, train

if __name__ == "__main__":
    base = Path(resolve_model(SMOLLM2))
    rows = failures.rows(6, failures.READING, reflections(), random.Random(0))
    encoded = [encode(row.messages, AutoTokenizer.from_pretrained(base)) for row in rows]
    train(base, encoded, Settings(batch=1, save_every=2), Path(sys.argv[1]), ADAPTER, workers=1)
"""


def start(script: Path, output: Path) -> subprocess.Popen[bytes]:
    with (output.parent / f"{output.name}.log").open("a") as log:
        return subprocess.Popen([sys.executable, str(script), str(output)], stdout=log)


def test_a_killed_training_ends_with_the_weights_of_one_that_was_not(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(script, whole).wait() == 0
    first = start(script, killed)
    while not (killed / STATE).exists():
        assert first.poll() is None
        time.sleep(0.01)
    first.kill()
    first.wait()
    assert torch.load(killed / STATE)["updates"] < 6
    time.sleep(3)  # its worker sees that it is alone
    assert start(script, killed).wait() == 0
    assert (tmp_path / "killed.log").read_text().count('"update": 0,') == 1  # not from the beginning
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (whole, killed))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not (killed / STATE).exists()
