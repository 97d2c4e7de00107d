"""`make soak` in a small size."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.rare, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]


def test_a_small_soak_loses_nothing() -> None:
    """100 episodes; with this seed the gateway is killed once and the disk is full once."""
    rates = [
        "--gateway-kills",
        "0.2",
        "--full-disks",
        "0.2",
        "--world-deaths",
        "0.1",
        "--agent-kills",
        "0.1",
        "--hostile",
        "0.2",
    ]
    options = ["--episodes", "100", "--agents", "16", "--seed", "31", "--patience", "10", *rates]
    command = [sys.executable, "-m", "tests.soak", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # Not the exit code: how long /healthz waits depends on what else the machine does.
    for goal in ("nothing acknowledged is lost: nothing: met", "no process is left: 0: met"):
        assert goal in done.stdout, done.stdout + done.stderr[-3000:]
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in done.stdout.splitlines() if line[0:1] == "│"]
    counts = {name: float(count.replace(",", "")) for name, count in cells if name != "load" and count != "-"}
    assert counts["gateway kills"] >= 1 and counts["full disks"] >= 1 and counts["worlds killed"] >= 1
    assert counts["hostile requests refused"] > 50
    assert counts["tips"] > 20 and counts["visits"] > 50 and counts["rewards"] > 50 and counts["processes left"] == 0
