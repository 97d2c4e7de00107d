"""Two steps with verl 0.9.1 and vLLM 0.24: what the next versions ask for is tests/verl_09.py."""

import subprocess
from pathlib import Path

import pytest

from gpu_proof.runs import HOUSES, SIZES, STACK

from .stack import environment, metrics_of

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "build" / "verl-0.9" / "bin" / "python"


@pytest.mark.stack
@pytest.mark.rare
@pytest.mark.timeout(3600)
def test_two_steps_are_trained_with_tips_and_both_updates(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("needs verl 0.9.1 and vLLM 0.24: make next-verl (a minute, 400 MB)")
    settings = [*SIZES[False], *STACK, "run.steps=2", "run.name=next", f"run.directory={tmp_path}"]
    command = [PYTHON, "-m", "empo2.recipe.cli", "train", "--config", HOUSES, *settings]
    variables = environment(VERL_USE_EXTERNAL_MODULES="verl_09")
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    log = tmp_path / "next" / "trainer.log"
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + log.read_text()[-3000:]
    first, second = metrics_of(tmp_path / "next")
    for step in (first, second):
        assert 0 < step["empo2/off_policy_fraction"] < 1
        assert step["empo2/rollouts_dropped"] == 0
    assert first["actor/grad_norm"] > 0
    assert second["empo2/tips_injected_per_call"] > 0
    assert max(step["rollout_corr/log_ppl_abs_diff"] for step in (first, second)) < 0.05  # of vLLM and trainer
