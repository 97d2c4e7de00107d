"""A killed writer loses nothing that it was told is stored, and leaves nothing half done."""

import copy
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from empo2.memory import MemoryStore

KILLS = 120
CAPACITY = 60
RATE = 0.3

# Forks a writer for each line that it reads, so that numpy is imported once, and says when it is dead. A writer says
# what it is about to do, does it, and says that it is done.
FORKER = f"""
import json, os, random, sys
import numpy as np
from empo2.memory import ByScore, MemoryStore, NewPlay, Step, Visit

path, kept = sys.argv[1:]
KEYS = np.random.default_rng(0).normal(size=(8, 384))
POLICY = ByScore(3, 0.5)

def say(word, value):
    os.write(1, f"{{word}} {{json.dumps(value)}}\\n".encode())

def write(run):
    dice = random.Random(run)
    store = MemoryStore(path, embedder="none", dimension=384, capacity={CAPACITY})
    for number in range(10**6):
        scope = dice.choice("xy")
        kind = dice.choices(["add", "play", "visit", "remove", "snapshot", "restore"], [8, 8, 4, 1, 2, 1])[0]
        if kind in ("snapshot", "restore") and not (os.path.exists(kept) or kind == "snapshot"):
            continue
        name = f"{{run}}-{{number}}"
        tips = store.search(scope, KEYS[dice.randrange(8)], POLICY)
        steps = [Step(f"{{name}}-{{i}}", KEYS[dice.randrange(8)], "go") for i in range(dice.randint(1, 20))]
        say("do", {{"kind": kind, "scope": scope, "name": name, "steps": len(steps),
                    "removed": [tip.episode for tip in tips[:1]]}})
        if kind == "add":
            store.add_episode(scope, name, tip=name, score=number % 3, success=None, steps=steps)
        elif kind == "play":
            play = NewPlay(scope, name, score=number % 7, success=None, searches=2, hits=1,
                           shown={{tip.id: 2 for tip in tips}}, reward=number % 7)
            store.record_play(play, learning_rate={RATE})
        elif kind == "visit":
            store.states.add_visits([Visit(scope, name, steps[0].key)], threshold=0.5)
        elif kind == "remove":
            store.remove_tips([tip.id for tip in tips[:1]])
        elif kind == "snapshot":
            store.snapshot(kept)
        else:
            store.restore(kept)
        say("done", None)

for run in sys.stdin:
    writer = os.fork()
    if writer == 0:
        write(int(run))
    say("pid", writer)
    os.waitpid(writer, 0)
    say("dead", writer)
"""


@dataclass
class Model:
    """What a memory file should hold."""

    entries: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: {"x": [], "y": []})  # (episode, step)
    plays: list[str] = field(default_factory=list)
    visits: int = 0

    def after(self, doing: dict) -> "Model":
        """After an add, play, visit or remove."""
        model = copy.deepcopy(self)
        held = model.entries[doing["scope"]]
        if doing["kind"] == "add":
            new = [(doing["name"], step) for step in range(doing["steps"])]
            model.entries[doing["scope"]] = (held + new)[-CAPACITY:]
        elif doing["kind"] == "remove":
            model.entries[doing["scope"]] = [entry for entry in held if entry[0] not in doing["removed"]]
        elif doing["kind"] == "play":
            model.plays.append(doing["name"])
        else:
            model.visits += 1
        return model


def read(path) -> Model:
    """What a memory file holds, once it is seen to be sound."""
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        model = Model()
        query = "SELECT scope, episode, step FROM entries JOIN tips ON tips.id = tip_id ORDER BY entries.id"
        for scope, *entry in db.execute(query):
            model.entries[scope].append(tuple(entry))
        with_entries = db.execute("SELECT count(DISTINCT tip_id) FROM entries").fetchone()
        assert with_entries == db.execute("SELECT count(*) FROM tips").fetchone()
        model.plays = [episode for (episode,) in db.execute("SELECT episode FROM plays ORDER BY rowid")]
        model.visits = db.execute("SELECT coalesce(sum(visits), 0) FROM states").fetchone()[0]
        # Values are those that the plays give, in their order.
        credits = db.execute("SELECT tip_id, score FROM credits JOIN plays USING (episode) ORDER BY plays.rowid")
        values: dict[int, float] = {}
        for tip, reward in credits:
            values[tip] = values.get(tip, 0.0) + RATE * (reward - values.get(tip, 0.0))
        for tip, value in db.execute("SELECT id, value FROM tips"):
            assert value == pytest.approx(values.get(tip, 0.0), abs=1e-12)
    return model


def one_of[T: Model | None](path, *models: T) -> T:
    stored = read(path) if path.exists() else None
    assert stored in models
    return next(model for model in models if model == stored)


@pytest.mark.timeout(240)
def test_sigkill_loses_nothing_acknowledged(tmp_path):
    path, kept_path, dice = tmp_path / "memory.db", tmp_path / "kept.db", random.Random(0)
    model, kept = Model(), None
    in_flight = 0
    MemoryStore(path, embedder="none", dimension=384, capacity=CAPACITY).close()
    forker = subprocess.Popen(
        [sys.executable, "-c", FORKER, str(path), str(kept_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process with threads should not fork
    )
    with forker:
        assert forker.stdin and forker.stdout
        for run in range(KILLS):
            forker.stdin.write(f"{run}\n")
            forker.stdin.flush()
            writer, said, acknowledged = None, [], dice.randrange(0, 8)
            while writer is None or sum(word == "done" for word, _ in said) < acknowledged:
                word, value = forker.stdout.readline().split(maxsplit=1)
                if word == "pid":
                    writer = int(value)
                else:
                    assert word != "dead", "the writer failed"
                    said.append((word, json.loads(value)))
            time.sleep(dice.uniform(0, 0.004))  # into the middle of whatever it is doing
            os.kill(writer, signal.SIGKILL)
            while (line := forker.stdout.readline().split(maxsplit=1))[0] != "dead":
                said.append((line[0], json.loads(line[1])))

            doing = None
            for word, value in [*said, ("killed", None)]:
                if word == "do":
                    doing = value
                elif doing is not None:  # it is done, or it was in flight
                    model_after, kept_after = model, kept
                    if doing["kind"] == "snapshot":
                        kept_after = model
                    elif doing["kind"] == "restore":
                        assert kept
                        model_after = kept
                    else:
                        model_after = model.after(doing)
                    if word == "killed":
                        in_flight += 1
                        model_after = one_of(path, model, model_after)
                        kept_after = one_of(kept_path, kept, kept_after)
                    model, kept, doing = model_after, kept_after, None
            assert read(path) == model
        forker.stdin.close()
    assert in_flight > KILLS // 10
