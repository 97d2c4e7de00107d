"""The whole stack, real: agents that stream, with a tool, in each of the APIs that agents speak, are trained."""

import subprocess
from pathlib import Path

import pytest

from .test_train import CLI, _environment, metrics_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1500)]


def test_agents_that_stream_are_trained_in_every_dialect(tmp_path: Path) -> None:
    """Two steps, the second with memory; three tasks of two rollouts, two calls each."""
    arguments = [
        "run.name=test",
        "run.steps=2",
        "run.validate_first=false",
        "agent.class=stack_agent:SpeakingAgent",
        "agent.env={WAY: input.way}",
        "tasks.source=stack_agent:ways",
        "memory.scope=[way]",
        "algorithm.seed=36",  # no memory, then memory
        "algorithm.return_tolerance=0",
        "algorithm.tasks_per_step=3",
        "algorithm.rollouts_per_task=2",
    ]
    done = subprocess.run(
        [*CLI, "train", "--profile", "cpu", *arguments],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = metrics_of(tmp_path / "runs" / "test")
    for metrics in (first, second):
        assert (metrics["empo2/calls"], metrics["empo2/rollouts_dropped"]) == (12, 0)
    assert first["empo2/hit_rate"] == 0 < second["empo2/hit_rate"]
