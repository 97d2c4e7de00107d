"""Measure the search for 10 of many tips: the memory's search, a Python loop, the memory bandwidth and sqlite-vec.

Every entry has a key of 384 floats, and the 20 entries of an episode share its tip. About half of the entries are
similar enough to a query (cosine above 0.5), and scores have ten levels, so there is much to sort and there are many
ties. The benchmark fails unless all ways return the same ten tips, best score first.

  ours         MemoryStore.search, with the texts of the tips read from SQLite
  arrays       a Python loop over a list of entries: cosine of two numpy arrays, then a sort by score
  lists        the same loop with keys as lists of floats, as in the EMPO2 authors' memory server (up to 100,000)
  bandwidth    one pass over the bytes of the keys: no exact search can be faster
  sqlite-vec   the same search in SQL, if the packages sqlite-vec and apsw are installed
  writes       episodes of one step committed per second to a full memory, beside 64 searches per second
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from shared import Goal, empty_table, report, say

from empo2.memory import ByScore, MemoryStore, Step

SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 5_000)
GOAL_SIZE = 100_000
DIMENSION, STEPS, K, MIN_SIMILARITY = 384, 20, 10, 0.5
SCOPE = "bench"
SEARCHES_PER_SECOND = 64
LONGEST_LISTS = 100_000  # 384 Python floats take 12 kB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 and 5,000 entries, a few seconds: a smoke run")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help=f"numbers of entries (default: {SIZES})")
    options = parser.parse_args()
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    seconds = 0.5 if options.quick else 5.0
    columns = ("ours p50", "ours p99", "arrays", "arrays / ours", "lists", "lists / ours")
    columns += ("bandwidth p50", "ours / bandwidth", "sqlite-vec", "writes/s", "search p99 beside")
    table = empty_table(f"{K} of n entries of {DIMENSION} floats, milliseconds", ["entries"], columns)
    goals = _goals(None)
    for size in sizes:
        found = measure(size, seconds)
        table.add_row(f"{size:,}", *_cells(found))
        if size == GOAL_SIZE:
            goals = _goals(found)
    report(table, goals)


def measure(size: int, seconds: float) -> dict[str, float]:
    """Return all measured figures for one size: milliseconds, and writes per second."""
    say(f"{size:,} entries: keys")
    generator = np.random.default_rng(size)
    keys = _keys(generator, size)
    scores = np.repeat(10.0 * generator.integers(0, 10, size // STEPS + 1), STEPS)[:size]
    queries = _keys(generator, 64)
    entries = [{"key": key, "tip": f"tip {i // STEPS}", "score": scores[i]} for i, key in enumerate(keys)]
    with tempfile.TemporaryDirectory() as folder:
        say(f"{size:,} entries: into the memory")
        store = MemoryStore(Path(folder, "memory.sqlite"), embedder="bench", dimension=DIMENSION, capacity=size)
        for start in range(0, size, STEPS):
            steps = [Step(f"state {i}", keys[i], "act") for i in range(start, min(start + STEPS, size))]
            tip = f"tip {start // STEPS}"
            store.add_episode(SCOPE, tip, tip=tip, score=scores[start], success=None, steps=steps)

        say(f"{size:,} entries: searches")
        policy = ByScore(K, MIN_SIMILARITY)
        tips = [tip.text for tip in store.search(SCOPE, queries[0], policy)]
        words = keys.view(np.uint64).ravel()
        ours = _times(lambda i: store.search(SCOPE, queries[i % len(queries)], policy), seconds)
        bound = _times(lambda i: np.add.reduce(words), seconds / 2)
        found = {
            "ours p50": float(np.median(ours)),
            "ours p99": float(np.percentile(ours, 99)),
            "bandwidth": float(np.median(bound)),
        }
        for name, convert in ("arrays", np.asarray), ("lists", np.ndarray.tolist):
            if name == "lists" and size > LONGEST_LISTS:
                continue
            say(f"{size:,} entries: the Python loop over {name}")
            converted = [{**entry, "key": convert(entry["key"])} for entry in entries]
            query = convert(queries[0])
            _same(tips, loop(converted, query), name)
            found[name] = float(np.median(_times(lambda i, e=converted, q=query: loop(e, q), seconds / 2)))
        if importlib.util.find_spec("sqlite_vec") and importlib.util.find_spec("apsw"):
            say(f"{size:,} entries: sqlite-vec")
            search = sql_search(entries)
            _same(tips, search(queries[0]), "sqlite-vec")
            found["sqlite-vec"] = float(np.median(_times(lambda i: search(queries[i % len(queries)]), seconds / 2)))
        say(f"{size:,} entries: writes beside searches")
        found |= write_beside_searches(store, queries, seconds)
        store.close()
    return found


def loop(entries: list[dict[str, Any]], query: Any) -> list[str]:
    """Return the texts of the K best entries, each text once, found by plain Python."""
    similar = []
    for number, entry in enumerate(entries):
        cosine = np.dot(query, entry["key"]) / (np.linalg.norm(query) * np.linalg.norm(entry["key"]))
        if cosine > MIN_SIMILARITY:
            similar.append((entry["score"], cosine, number))
    similar.sort(reverse=True)
    texts: dict[str, None] = {}
    for _, _, number in similar:
        texts.setdefault(entries[number]["tip"])
        if len(texts) == K:
            break
    return list(texts)


def sql_search(entries: list[dict[str, Any]]) -> Callable[[np.ndarray], list[str]]:
    """Return the same search in SQL, with a function of sqlite-vec, in a database in RAM.

    It uses apsw, since many builds of Python's own sqlite3 cannot load extensions. It does not use sqlite-vec's `vec0`
    tables: they find the nearest keys, not the best score among all keys that are similar enough.
    """
    import apsw  # pyright: ignore[reportMissingImports]
    import sqlite_vec  # pyright: ignore[reportMissingImports]

    db = apsw.Connection(":memory:")
    db.enable_load_extension(True)
    db.load_extension(sqlite_vec.loadable_path())
    db.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, tip TEXT, score REAL, key BLOB)")
    with db:
        rows = ((i, entry["tip"], float(entry["score"]), entry["key"].tobytes()) for i, entry in enumerate(entries))
        db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
    # The entries of a tip share its score, so the best of them is the nearest.
    query = (
        "WITH near AS MATERIALIZED (SELECT id, tip, score, vec_distance_cosine(key, ?) AS distance FROM entries)"
        " SELECT tip, min(distance) AS nearest FROM near WHERE distance < ? GROUP BY tip"
        " ORDER BY score DESC, nearest, id DESC LIMIT ?"
    )
    return lambda key: [tip for tip, _ in db.execute(query, (key.tobytes(), 1 - MIN_SIMILARITY, K))]


def write_beside_searches(store: MemoryStore, queries: np.ndarray, seconds: float) -> dict[str, float]:
    """Write episodes as fast as they are committed, with a search whenever one is due, all in one thread."""
    started = time.perf_counter()
    end, due, writes, searches = started + seconds, started, 0, []
    while (now := time.perf_counter()) < end:
        if now >= due:
            store.search(SCOPE, queries[len(searches) % len(queries)], ByScore(K, MIN_SIMILARITY))
            searches.append(1000 * (time.perf_counter() - now))
            due = max(due + 1 / SEARCHES_PER_SECOND, now)
        step = Step(f"new state {writes}", queries[writes % len(queries)], "act")
        store.add_episode(SCOPE, f"new {writes}", tip=f"new tip {writes}", score=50.0, success=None, steps=[step])
        writes += 1
    return {"writes": writes / (time.perf_counter() - started), "beside p99": float(np.percentile(searches, 99))}


def _keys(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return unit keys [count, DIMENSION] around one center, any two at a cosine of 0.5 on average."""
    keys = generator.standard_normal((count, DIMENSION), np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    keys[:, 0] += 1
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return keys


def _times(work: Callable[[int], object], seconds: float) -> list[float]:
    """Return the milliseconds of each of as many calls as fit, at least 1 and at most 2,000."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2_000 and (not times or time.perf_counter() < end):
        started = time.perf_counter()
        work(len(times))
        times.append(1000 * (time.perf_counter() - started))
    return times


def _same(tips: list[str], others: list[str], name: str) -> None:
    if tips != others:
        raise RuntimeError(f"{name} finds {others}, and the memory {tips}: they are not doing the same")


def _cells(found: dict[str, float]) -> list[str]:
    def cell(name: str, form: str = ".3g") -> str:
        return f"{found[name]:{form}}" if name in found else "-"

    def ratio(name: str) -> str:
        return f"{found[name] / found['ours p50']:.0f} x" if name in found else "-"

    of_bound = f"{found['ours p50'] / found['bandwidth']:.1f} x"
    searches = [cell("ours p50"), cell("ours p99"), cell("arrays", ",.1f"), ratio("arrays"), cell("lists", ",.1f")]
    return [
        *(*searches, ratio("lists"), cell("bandwidth"), of_bound),
        *(cell("sqlite-vec", ",.1f"), cell("writes", ",.0f"), cell("beside p99")),
    ]


def _goals(found: dict[str, float] | None) -> list[Goal]:
    texts = (
        f"at least 100 times as fast as the loop over lists, {GOAL_SIZE:,} entries",
        f"p99 at most 10 ms, {GOAL_SIZE:,} entries",
        f"at least 1,000 writes per second beside the searches, {GOAL_SIZE:,} entries",
    )
    if found is None:
        return [Goal(text, None, False) for text in texts]
    ratio, p99, writes = found["lists"] / found["ours p50"], found["ours p99"], found["writes"]
    return [
        Goal(texts[0], f"{ratio:.0f} x ({found['arrays'] / found['ours p50']:.0f} x over arrays)", ratio >= 100),
        Goal(texts[1], f"{p99:.1f} ms", p99 <= 10),
        Goal(texts[2], f"{writes:,.0f}", writes >= 1000),
    ]


if __name__ == "__main__":
    main()
