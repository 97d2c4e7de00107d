"""The benchmarks start: one in its smoke size, whose ways of searching must agree, the others as far as their help."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.rare, pytest.mark.timeout(1800)]

BENCH = Path(__file__).parents[1] / "bench"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCH / script), *arguments], capture_output=True, text=True)


def test_retrieval_in_its_smoke_size() -> None:
    done = run("retrieval.py", "--quick")
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert rows == ["1,000", "5,000"]
    assert done.stdout.count("not in this run") == 3, done.stdout  # the goals are for 100,000 entries


@pytest.mark.parametrize(
    "script",
    ["async_rollouts.py", "gateway.py", "novelty.py", "prefix.py", "soak.py", "step.py", "tokens.py", "webshop.py"],
)
def test_help(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert ("--episodes" if script == "soak.py" else "--quick") in done.stdout


def test_a_small_soak_loses_nothing() -> None:
    """100 episodes; with this seed the gateway is killed once and the disk is full once."""
    rates = ["--gateway-kills", "0.2", "--full-disks", "0.2", "--world-deaths", "0.1", "--agent-kills", "0.1"]
    done = run("soak.py", "--episodes", "100", "--agents", "16", "--seed", "31", "--patience", "10", *rates)
    # Not the exit code: how long /healthz waits depends on what else the machine does.
    for goal in ("nothing acknowledged is lost: nothing: met", "no process is left: 0: met"):
        assert goal in done.stdout, done.stdout + done.stderr[-3000:]
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in done.stdout.splitlines() if line[0:1] == "│"]
    counts = {name: float(count.replace(",", "")) for name, count in cells if name != "load" and count != "-"}
    assert counts["gateway kills"] >= 1 and counts["full disks"] >= 1 and counts["worlds killed"] >= 1
    assert counts["tips"] > 20 and counts["visits"] > 50 and counts["rewards"] > 50 and counts["processes left"] == 0
