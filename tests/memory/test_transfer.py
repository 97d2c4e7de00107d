"""Export and import: what goes out comes in, once; what is wrong changes nothing."""

import json
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from empo2.memory import BySimilarity, MemoryFileError, MemoryStore, Step, Visit
from empo2.memory.file import reading
from empo2.memory.transfer import Records, export_records, import_records, read_records

from .stores import play, visit

ODD = '"quotes", \u2028 and\nlines: é😀\x00'


class Hashes:
    """Equal texts have cosine 1, all others about 0."""

    def __init__(self, name: str = "hashes", dimension: int = 32) -> None:
        self.name, self.dimension = name, dimension
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.texts += texts
        keys = [np.random.default_rng(zlib.crc32(text.encode())).normal(size=self.dimension) for text in texts]
        vectors = np.array(keys, np.float32).reshape(-1, self.dimension)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def open_store(path: Path, embedder: Hashes) -> MemoryStore:
    return MemoryStore(path, embedder=embedder.name, dimension=embedder.dimension)


def fill(path: Path, embedder: Hashes) -> Path:
    def steps(*states: str) -> list[Step]:
        return [Step(state, key, f"act {state}") for state, key in zip(states, embedder.embed(states), strict=True)]

    with closing(open_store(path, embedder)) as store:
        store.add_episode("a", "gone", tip="t0", score=1, success=None, steps=steps("x"))
        store.add_episode("a", "one", tip="t1", score=-2.5, success=False, steps=steps("x", "y"), value=0.25)
        store.add_episode(ODD, "two", tip=ODD, score=1e300, success=True, steps=steps("x", ODD), created=12.5)
        store.add_episode("a", "three", tip="t1", score=-2.5, success=True, steps=steps("y", "z"))  # y is there already
        play(store, "p", {1: 2, 2: 3, 4: 1}, scope="a", score=3, searches=5, hits=4, reward=1)
        play(store, "q", scope=ODD, score=0, success=True, hits=0)
        store.remove_tips([1])
        for state in ("x", "x", "y"):
            visit(store, "a", state, embedder.embed([state])[0], threshold=0.9)
        visit(store, ODD, ODD, embedder.embed([ODD])[0], threshold=0.9)
    return path


def exported(path: Path) -> list[dict]:
    with reading(path) as db:
        return [dict(record) for record in export_records(db)]


def from_file(path: Path, records: list[dict]) -> Records:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_records(path)


def bring(path: Path, records: Records, embedder: Hashes) -> tuple[int, int]:
    return import_records(path, records, embedder, progress=lambda batches: batches)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source.sqlite", Hashes())


@pytest.fixture
def records(source: Path, tmp_path: Path) -> Records:
    return from_file(tmp_path / "export.jsonl", exported(source))


def test_what_an_export_holds(source: Path) -> None:
    meta, *rest = exported(source)
    assert meta == {"kind": "meta", "schema": 2, "embedder": "hashes", "dimension": 32}
    tips, states, plays = ([each for each in rest if each["kind"] == kind] for kind in ("tip", "state", "play"))
    assert [(tip["episode"], tip["value"], tip["success"]) for tip in tips] == [
        ("one", 0.625, False),  # 0.25 + 0.5 (1 - 0.25)
        ("two", 0, True),
        ("three", 0.5, True),
    ]
    assert tips[0]["steps"] == [{"state": "x", "action": "act x"}, {"state": "y", "action": "act y"}]
    assert (tips[1]["scope"], tips[1]["text"], tips[1]["created"]) == (ODD, ODD, 12.5)
    visits = [(state["scope"], state["state"], state["visits"]) for state in states]
    assert visits == [("a", "x", 2), ("a", "y", 1), (ODD, ODD, 1)]
    fields = ("episode", "score", "success", "searches", "hits", "shown")
    assert [tuple(play[field] for field in fields) for play in plays] == [
        ("p", 3, None, 5, 4, {"one": 3, "three": 1}),  # "gone" has no tip any more
        ("q", 0, True, 1, 0, {}),
    ]


def test_there_and_back_with_another_embedder(source: Path, records: Records, tmp_path: Path) -> None:
    other = Hashes("other", dimension=8)
    assert bring(tmp_path / "new.sqlite", records, other) == (3, 2)
    meta, *rest = exported(source)
    assert exported(tmp_path / "new.sqlite") == [meta | {"embedder": "other", "dimension": 8}, *rest]
    assert sorted(other.texts) == sorted(["x", "y", "z", ODD])  # each once
    with closing(open_store(tmp_path / "new.sqlite", other)) as store:
        (tip,) = store.search(ODD, other.embed([ODD])[0], BySimilarity(10, 0.99))
        assert (tip.episode, tip.action, tip.similarity) == ("two", f"act {ODD}", pytest.approx(1))
        assert visit(store, "a", "x", other.embed(["x"])[0], threshold=0.99) == 3
    assert [path.name for path in tmp_path.iterdir() if "import" in path.name or "tmp" in path.name] == []


def test_into_a_memory_that_knows_a_part(records: Records, tmp_path: Path) -> None:
    embedder, path = Hashes(), tmp_path / "target.sqlite"
    with closing(open_store(path, embedder)) as store:
        x, w = embedder.embed(["x", "w"])
        store.add_episode("a", "one", tip="mine", score=4, success=True, steps=[Step("x", x, "mine")], value=0.125)
        visits = [Visit("a", "x", x)] * 10 + [Visit("a", "w", w)] * 4
        store.states.add_visits(visits, threshold=0.9)
        play(store, "p", [1], scope="a", score=9, reward=0.125)
    assert bring(path, records, embedder) == (2, 1)
    _, *rest = exported(path)
    by_episode = {record["episode"]: record for record in rest if record["kind"] == "tip"}
    assert (by_episode["one"]["text"], by_episode["one"]["value"]) == ("mine", 0.125)
    # Without the other "one", no step of "three" is known.
    assert list(by_episode) == ["one", "two", "three"] and len(by_episode["three"]["steps"]) == 1
    visits = {(r["scope"], r["state"]): r["visits"] for r in rest if r["kind"] == "state"}
    assert visits == {("a", "x"): 12, ("a", "w"): 4, ("a", "y"): 1, (ODD, ODD): 1}
    shown = [(record["episode"], record["shown"]) for record in rest if record["kind"] == "play"]
    assert shown == [("p", {"one": 1}), ("q", {})]


def test_a_second_time_only_visits_grow(source: Path, records: Records) -> None:
    before = exported(source)
    assert bring(source, records, Hashes()) == (0, 0)
    doubled = [record | {"visits": 2 * record["visits"]} if "visits" in record else record for record in before]
    assert exported(source) == doubled


def test_imported_visits_stop_growing_before_a_sum_could_overflow(tmp_path: Path) -> None:
    """Also of states whose keys are equal: only equal texts are one state."""
    states = [STATE | {"state": name, "visits": 2**31 - 1} for name in ("s", "t")]
    records = from_file(tmp_path / "most.jsonl", [json.loads(META), *states])
    embedder = Hashes(dimension=1)
    for _ in range(3):
        assert bring(tmp_path / "new.sqlite", records, embedder) == (0, 0)
    assert exported(tmp_path / "new.sqlite")[1:] == states


@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_changes_nothing(source: Path, records: Records, tmp_path: Path, exists: bool) -> None:
    target = source if exists else tmp_path / "new.sqlite"
    before = exported(source)
    records.tips[-1]["text"] = " "  # no line of a file gets so far
    with pytest.raises(ValueError, match="is empty"):
        bring(target, records, Hashes())
    assert exported(source) == before
    files = {path.name for path in tmp_path.iterdir() if not path.name.endswith(("-wal", "-shm"))}
    assert files == {"export.jsonl", "source.sqlite", "source.sqlite.lock"}


def test_nothing_gives_way_to_the_capacity_of_a_run(tmp_path: Path) -> None:
    steps = [{"state": f"s{number % 7}", "action": str(number)} for number in range(1500)]
    records = from_file(tmp_path / "long.jsonl", [json.loads(META), TIP | {"steps": steps}])
    for _ in ("new", "existing"):
        bring(tmp_path / "new.sqlite", records, Hashes())
        assert exported(tmp_path / "new.sqlite")[1]["steps"] == steps


META = '{"kind": "meta", "schema": 2, "embedder": "e", "dimension": 2}'
TIP = {"kind": "tip", "scope": "a", "episode": "e", "text": "t", "score": 1, "success": None, "value": 0, "created": 1}
TIP["steps"] = [{"state": "s", "action": "a"}]
STATE = {"kind": "state", "scope": "a", "state": "s", "visits": 1}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "is empty"),
        ([META, '{"kind": "a\\nb"}'], "line 2: .*'tip'"),
        ([META, META], "line 2: the first line, and only that"),
        ([json.dumps(TIP)], "line 1: the first line, and only that"),
        ([META.replace("2,", "1,", 1)], "line 1: has memory schema 1; .* reads schema 2"),
        ([META, json.dumps(STATE), json.dumps(TIP | {"text": " \x1c"})], "line 3: text: .*blank"),
        ([META, json.dumps(TIP).replace('"value": 0', '"value": 1e999')], "line 2: value: .*finite"),
        ([META, json.dumps(TIP | {"steps": [{"state": "s"}]})], r"line 2: steps\.0\.action: .*required"),
        ([META, json.dumps(STATE | {"visits": 2**31})], "line 2: visits: .*less than"),
        ([META, json.dumps(STATE).replace('"s"', '"\\ud83d"')], "line 2: Invalid JSON"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, lines: list[str], words: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(MemoryFileError, match=words) as caught:
        read_records(file)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)
