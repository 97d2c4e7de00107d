"""A killed writer loses nothing that it was told is stored."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing

import pytest

KILLS = 15
WRITER = """
import sys
from contextlib import closing
import numpy as np
from empo2.memory import MemoryStore, Step

path, run = sys.argv[1:]
store = MemoryStore(path, embedder="none", dimension=384, capacity=10**6)
keys = np.random.default_rng(0).normal(size=(30, 384))
for number in range(10**6):
    steps = [Step(f"state {i}", key, "go") for i, key in enumerate(keys)]
    store.add_episode("task", f"{run}-{number}", tip=f"tip {run}-{number}", score=1.0, success=True, steps=steps)
    print("episode", f"{run}-{number}", flush=True)
    print("visits", store.visit("task", "state", keys[0], threshold=0.9), flush=True)
"""


@pytest.mark.timeout(60)
def test_sigkill_loses_nothing_acknowledged(tmp_path):
    path, dice = tmp_path / "memory.db", random.Random(0)
    episodes, visits = set(), 0
    for run in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(run)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout
        with writer.stdout as acknowledgements:
            lines = [acknowledgements.readline() for _ in range(dice.randrange(1, 60))]
            os.kill(writer.pid, signal.SIGKILL)
            lines += acknowledgements.readlines()  # what was said between our last look and the kill
        assert writer.wait() == -signal.SIGKILL
        for kind, value in (line.split() for line in lines if line.endswith("\n")):
            if kind == "episode":
                episodes.add(value)
            else:
                visits = int(value)

        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            stored = Counter(
                episode for (episode,) in db.execute("SELECT episode FROM entries JOIN tips ON tips.id = tip_id")
            )
            assert episodes <= stored.keys()
            assert set(stored.values()) == {30}  # whole episodes only
            (counted,) = db.execute("SELECT coalesce(sum(visits), 0) FROM states").fetchone()
            assert counted >= visits
    assert len(episodes) > KILLS
