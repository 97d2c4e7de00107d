"""`make gpu-proof` on the CPU: its parts, and the whole stack, whose memory `empo2 check` has estimated."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_proof import runs

# Minutes by itself. CI runs it after `make test`; `make test-all` does, too.
pytestmark = [pytest.mark.stack, pytest.mark.rare, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("tier", "parts"),
    [
        ("parts", ["log-probs", "loss", "model", "embedder"]),
        ("stack", ["steps", "tips", "checkpoint", "weights", "LoRA", "memory", "seconds"]),
    ],
)
def test_every_part_of_a_tier_passes(tier: str, parts: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu_proof", tier, "--device", "cpu", "--runs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["PASS"]), done.stdout + done.stderr
    told = (line.partition(": ") for line in done.stderr.splitlines())
    assert [name for name, _, found in told if found in ("pass", "FAIL")] == parts  # beside what torch says


def test_memory_that_was_freed_before_it_was_sampled_counts() -> None:
    code = "held = b'x' * (300 << 20); del held; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        assert 300 << 20 < runs.tree_memory(process.pid) < 350 << 20
        process.communicate(b"\n")
