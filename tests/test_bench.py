"""The benchmarks start: one in its smoke size, whose ways of searching must agree, the others as far as their help."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_retrieval_in_its_smoke_size() -> None:
    done = run("retrieval.py", "--quick")
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert rows == ["1,000", "5,000"]
    assert done.stdout.count("not in this run") == 3, done.stdout  # the goals are for 100,000 entries


@pytest.mark.parametrize("script", ["gateway.py", "novelty.py", "prefix.py", "step.py", "webshop.py"])
def test_help(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
