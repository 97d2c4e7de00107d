"""A killed writer loses nothing that it was told is stored, and leaves nothing half done.

The same operations are done on a second memory in peace. Run as a script, this file forks the writers.
"""

import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from empo2.memory import ByScore, MemoryStore, NewPlay, Step, Visit

pytestmark = pytest.mark.slow

KILLS = 120
KEYS = np.random.default_rng(0).normal(size=(8, 384))
KINDS = {"add": 8, "play": 8, "visit": 4, "remove": 1, "snapshot": 2, "restore": 1}


def open_store(folder: Path) -> MemoryStore:
    return MemoryStore(folder / "memory.db", embedder="none", dimension=384, capacity=60)


def operate(store: MemoryStore, folder: Path, number: int) -> None:
    """Do the operation of this number; equal memories stay equal."""
    dice, name = random.Random(number), f"e{number}"
    (kind,) = dice.choices([*KINDS], [*KINDS.values()]) if number else ["snapshot"]
    scope, key = dice.choice("xy"), KEYS[dice.randrange(8)]
    tips = store.search(scope, key, ByScore(3, 0.5))
    match kind:
        case "add":
            steps = [Step(f"{name}-{i}", KEYS[dice.randrange(8)], "go") for i in range(dice.randint(1, 20))]
            store.add_episode(scope, name, tip=name, score=number % 3, success=None, steps=steps)
        case "play":
            shown, reward = {tip.id: 2 for tip in tips}, number % 7
            play = NewPlay(scope, name, score=reward, success=None, searches=2, hits=1, shown=shown, reward=reward)
            store.record_play(play, learning_rate=0.3)
        case "visit":
            store.states.add_visits([Visit(scope, name, key)], threshold=0.5)
        case "remove":
            store.remove_tips([tip.id for tip in tips[:1]])
        case "snapshot":
            store.snapshot(folder / "kept.db")
        case "restore":
            store.restore(folder / "kept.db")


def write(folder: Path, first: int) -> None:
    """Say before each operation what is to be done, and after it that it is done."""
    os.write(1, f"{os.getpid()}\n".encode())
    store = open_store(folder)
    for number in itertools.count(first):
        os.write(1, b"do ")
        operate(store, folder, number)
        os.write(1, b"done\n")


def held(folder: Path) -> list[list[tuple]]:
    """All that a memory and its snapshot hold, but dates, once they are seen to be sound."""
    columns = {"tips": "id, scope, episode, text, score, value", "plays": "episode, scope, score"}
    found = []
    for file in sorted(folder.glob("*.db")):
        with closing(sqlite3.connect(file)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            for table in ("tips", "entries", "states", "plays", "credits"):
                found.append(db.execute(f"SELECT {columns.get(table, '*')} FROM {table}").fetchall())
    return found


@pytest.mark.timeout(240)
def test_sigkill_loses_nothing_acknowledged(tmp_path):
    killed, unharmed = tmp_path / "killed", tmp_path / "unharmed"
    killed.mkdir()
    unharmed.mkdir()
    open_store(killed).close()
    dice, done, in_flight = random.Random(0), 0, 0
    command = [sys.executable, __file__, str(killed)]
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # a process with threads should not fork
    forker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone)
    with forker, closing(open_store(unharmed)) as store:
        assert forker.stdin and forker.stdout
        for _ in range(KILLS):
            print(done, file=forker.stdin, flush=True)
            writer, before = int(forker.stdout.readline()), done
            for _ in range(dice.randrange(8)):
                assert forker.stdout.readline() == "do done\n"
                done += 1
            time.sleep(dice.uniform(0, 0.004))  # into the middle of whatever it is doing
            os.kill(writer, signal.SIGKILL)
            while (line := forker.stdout.readline()) == "do done\n":
                done += 1
            for number in range(before, done):
                operate(store, unharmed, number)
            if line == "do dead\n":
                in_flight += 1
                if held(killed) != held(unharmed):
                    operate(store, unharmed, done)
                    done += 1
            assert held(killed) == held(unharmed)
        forker.stdin.close()
    assert in_flight > KILLS // 10


if __name__ == "__main__":
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            write(Path(sys.argv[1]), int(line))
        os.waitpid(child, 0)
        os.write(1, b"dead\n")
