"""Any history of any scopes gives what a plain model of the store gives, and scopes never mix."""

import copy
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory import ByScore

from .stores import add, open_store, play, sizes, visit

KEYS = np.random.default_rng(3).normal(size=(6, 3)).astype(np.float32)
KEYS /= np.linalg.norm(KEYS, axis=1, keepdims=True)
K, MIN_SIMILARITY, RATE = 3, 0.3, 0.3


def similarity(key, query):
    return float(np.vecdot(KEYS[key], KEYS[query]))


@dataclass
class Model:
    """A store in plain Python: a list of entries and of states per scope, a dict of tips."""

    capacity: int
    tips: dict = field(default_factory=dict)  # id -> [scope, episode, text, score, value]
    entries: dict = field(default_factory=dict)  # scope -> [(tip, state, action, key)]
    states: dict = field(default_factory=dict)  # scope -> [[state, key, visits]]
    plays: set = field(default_factory=set)  # episodes
    next_id: int = 1

    def add_episode(self, scope, episode, text, score, steps):
        held = self.entries.setdefault(scope, [])
        known = {(*self.tips[tip][2:4], *step) for tip, *step, _ in held}
        new = []
        for state, key, action in steps:
            if (text, score, state, action) not in known:
                known.add((text, score, state, action))
                new.append((self.next_id, state, action, key))
        new = new[-self.capacity :]
        if new:
            self.tips[self.next_id] = [scope, episode, text, score, 0.0]
            self.next_id += 1
            self.entries[scope] = (held + new)[-self.capacity :]
            self.forget_tips_without_entries()
        return new[0][0] if new else None

    def forget_tips_without_entries(self):
        kept = {tip for entries in self.entries.values() for tip, *_ in entries}
        self.tips = {tip: row for tip, row in self.tips.items() if tip in kept}

    def remove(self, ids):
        removed = len(self.tips.keys() & ids)
        self.entries = {s: [entry for entry in rows if entry[0] not in ids] for s, rows in self.entries.items()}
        self.forget_tips_without_entries()
        return removed

    def play(self, episode, shown, reward):
        if episode not in self.plays:
            self.plays.add(episode)
            for tip in self.tips.keys() & shown:
                self.tips[tip][4] += RATE * (reward - self.tips[tip][4])

    def visit(self, scope, state, key):
        rows = self.states.setdefault(scope, [])
        near = [row for row in rows if similarity(row[1], key) > MIN_SIMILARITY]
        count = sum(row[2] for row in near) + 1
        if near:
            max(near, key=lambda row: similarity(row[1], key))[2] += 1
        else:
            rows.append([state, key, 1])
        return count

    def search(self, scope, query):
        """Tip, action and value of what `ByScore` should find: by score, similarity, value, the newest first."""
        rows = []
        for place, (tip, _, action, key) in enumerate(self.entries.get(scope, [])):
            _, _, text, score, value = self.tips[tip]
            if (cosine := similarity(key, query)) > MIN_SIMILARITY:
                rows.append((score, cosine, value, place, text, (tip, action, value)))
        best = {}
        for *_, text, found in sorted(rows, reverse=True):
            best.setdefault(text, found)
        return [*best.values()][:K]


SCOPE = st.sampled_from(["", " ", "a", "A", "a ", "é", "e\u0301", "\0", "a\0", "1", "1.0", "%", "'; --", '{"t": 1}'])
NUMBER = st.integers(0, 12)  # of an episode, a tip, a play
STEP = st.tuples(st.sampled_from(["s0", "s1", "s2"]), st.integers(0, 5), st.sampled_from(["go", "look"]))
ADD = st.tuples(
    st.just("add"), NUMBER, st.sampled_from(["t0", "t1", "t2"]), st.sampled_from([0.0, 1.0]), st.lists(STEP, max_size=5)
)
OPERATION = st.one_of(
    ADD,
    ADD,
    st.tuples(st.just("play"), NUMBER, st.sets(NUMBER, max_size=4), st.sampled_from([-1.0, 0.3, 1.0])),
    st.tuples(st.just("visit"), st.sampled_from(["s0", "s1"]), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.sets(NUMBER, max_size=2)),
    st.tuples(st.sampled_from(["snapshot", "restore", "reopen"])),
)


@given(
    st.lists(SCOPE, min_size=2, max_size=3, unique=True),
    st.lists(st.tuples(st.integers(0, 2), OPERATION, st.integers(0, 5)), max_size=25),
    st.integers(1, 8),
)
@settings(max_examples=80)
def test_any_history_gives_what_a_plain_model_gives(scopes, history, capacity):
    with TemporaryDirectory() as folder:
        path = Path(folder, "memory.db")

        def check(query):
            for scope in scopes:
                found = store.search(scope, KEYS[query], ByScore(K, MIN_SIMILARITY))
                assert [(tip.id, tip.action, tip.value) for tip in found] == model.search(scope, query)
            held = Counter(tip[0] for tip in model.tips.values())
            assert sizes(path) == {scope: (tips, len(model.entries[scope])) for scope, tips in held.items()}
            assert store.size() == len(model.tips)

        store, model, kept = open_store(path, capacity=capacity), Model(capacity), None
        try:
            for which, (kind, *values), query in history:
                scope = scopes[which % len(scopes)]
                match kind, values:
                    case "add", [number, text, score, steps]:
                        known = any(tip[1] == f"e{number}" for tip in model.tips.values())
                        expected = None if known else model.add_episode(scope, f"e{number}", text, score, steps)
                        given = [(state, KEYS[key], action) for state, key, action in steps]
                        assert add(store, f"e{number}", *given, scope=scope, tip=text, score=score) == expected
                    case "play", [number, shown, reward]:
                        model.play(f"p{number}", shown, reward)
                        play(store, f"p{number}", shown, scope=scope, reward=reward, learning_rate=RATE)
                    case "visit", [state, key]:
                        expected = model.visit(scope, state, key)
                        assert visit(store, scope, state, KEYS[key], threshold=MIN_SIMILARITY) == expected
                    case "remove", [ids]:
                        assert store.remove_tips(ids) == model.remove(ids)
                    case "snapshot", []:
                        store.snapshot(f"{folder}/kept.db")
                        kept = copy.deepcopy(model)
                    case "restore", [] if kept:
                        store.restore(f"{folder}/kept.db")
                        model = replace(copy.deepcopy(kept), next_id=model.next_id)
                    case "reopen", []:
                        store.close()
                        store = open_store(path, capacity=capacity)
                check(query)
        finally:
            store.close()
        with closing(open_store(path, capacity=capacity)) as store:
            check(0)
