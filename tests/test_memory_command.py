"""``empo2 memory``: what it shows, what it changes, and one clear line for what it cannot do."""

import hashlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import memory_values
import numpy as np
import pytest

from empo2.memory import EmbedderError, MemoryStore, Visit
from empo2.recipe.cli import main
from empo2.recipe.cli import memory as memory_command
from empo2.recipe.errors import ConfigError
from empo2.recipe.run_folder import damage_of, mark_complete

from .memory.stores import add, play

PLANT0, PLANT1 = (json.dumps({"task": "find-plant", "variation": number}) for number in (0, 1))
ODD = "no JSON \x1b[31m at all"


class Words:
    """Embeds a text as the hashes of its words."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        if name == "no/such/model":
            raise EmbedderError(f"embedder model {name!r} does not load:\nno network")
        self.name, self.dimension = name, 48 if name == "bigger" else 32

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.array([self._key(text) for text in texts], np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _key(self, text: str) -> np.ndarray:
        words = (np.random.default_rng(zlib.crc32(word.encode())) for word in [*text.split(), "."])
        return sum((generator.normal(size=self.dimension) for generator in words), np.zeros(self.dimension))


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_command, "SentenceEmbedder", Words)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with its memory, in the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    now, embedder = time.time(), Words("words")
    with closing(MemoryStore(tmp_path / "run/memory.sqlite", embedder="words", dimension=32)) as store:
        for episode, scope, tip, score, success, age, value, state in [
            ("low", PLANT0, "Do not eat [bold]the plant[/bold].", -50, False, 30, 0, "outside near some plants"),
            ("high", PLANT0, "The plant is in the garden.", 100, True, 7200, 0, "a kitchen with a door"),
            ("other", PLANT1, "Open the door first: " + "go on " * 40, 25.5, None, 864_000, 0, "a kitchen with a door"),
            ("odd", ODD, "red \x1b[31m alert\nand more", 1, None, 86_400, -0.5, "a kitchen with a window"),
        ]:
            given = {"tip": tip, "score": score, "success": success, "created": now - age, "value": value}
            add(store, episode, (state, embedder.embed([state])[0]), scope=scope, **given)
        for episode, score, shown, hits in [("p", 1.0, {1: 4, 2: 1}, 3), ("q", -1.0, {2: 2}, 2), ("r", 0.0, {}, 0)]:
            play(store, episode, shown, scope=PLANT0, score=score, success=score > 0, searches=4, hits=hits)
        store.states.add_visits([Visit(PLANT0, "a garden", embedder.embed(["a garden"])[0])], threshold=0.9)
    return tmp_path / "run"


type Ask = Callable[..., list[str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Lines that a verb prints; or the one that says why it is refused."""

    def ask(*arguments: object, refused: bool = False) -> list[str]:
        code = main(["memory", *map(str, arguments)])
        output, errors = capsys.readouterr()
        if refused:
            assert (code, output, errors.count("\n"), errors[:14]) == (2, "", 1, "empo2: error: ")
            return [errors]
        assert (code, "\x1b" in output) == (0, False)
        assert errors == "" or arguments[0] == "import"
        return [line.rstrip() for line in output.splitlines()]

    return ask


def rows(lines: list[str]) -> list[list[str]]:
    """The words of a table's rows, those of continued lines left out."""
    rule = next(index for index, line in enumerate(lines) if line.startswith("──"))
    return [line.split() for line in lines[rule + 1 :] if re.match(r" *-?[\d.]+ ", line)]


def ids(memory: Path) -> list[int]:
    with closing(sqlite3.connect(f"file:{memory}?mode=ro", uri=True)) as db:
        return [tip for (tip,) in db.execute("SELECT id FROM tips ORDER BY id")]


def state_of(folder: Path) -> dict[str, str]:
    """The files in a folder and their content, save for locks, for SQLite's index of a log and for empty logs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".sqlite-shm")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.stat().st_size}


def test_show(run: Path, ask: Ask) -> None:
    lines = ask("show", run, "--order", "used")
    assert [row[0] for row in rows(lines)] == ["100", "-50", "25.5", "1"] and max(map(len, lines)) <= 80
    assert [row[0] for row in rows(ask("show", run, "-n", 2))] == ["100", "25.5"]
    text = "\n".join(ask("show", run))
    # Q of "high": 0 -> 0.5 (reward 1) -> -0.25 (reward -1), each with a learning rate of 0.5
    assert re.search(r"100 +yes +-0.25 +2 +2 h +find-plant 0\n +The plant is in the garden\.", text)
    assert re.search(r"no JSON �\[31m at all\n +red �\[31m alert and more", text)
    lines = ask("show", run / "memory.sqlite", "--scope", "task=find-plant,variation=0")
    assert lines[0].strip() == "task=find-plant,variation=0"
    assert any(re.match(r"  -50 +no +0\.50 +1 +\d+ s +Do not eat \[bold\]the plant\[/bold\]\.", line) for line in lines)


@pytest.mark.parametrize(
    ("scope", "scores"),
    [
        ('{"variation": 1, "task": "find-plant"}', ["25.5"]),
        ('{"task": "find-plant"}', ["100", "25.5", "-50"]),
        ("variation=0", ["100", "-50"]),
        ("variation=1,task=find-plant", ["25.5"]),
        (ODD, ["1"]),
    ],
)
def test_scopes_by_their_fields(run: Path, ask: Ask, scope: str, scores: list[str]) -> None:
    assert [row[0] for row in rows(ask("show", run, "--scope", scope))] == scores


def test_search(run: Path, ask: Ask) -> None:
    """Tips of a kitchen with a door (cosine 1) and with a window; the garden is too far away, whatever its score."""
    before = state_of(run)
    for policy, scores in (("score", ["100", "25.5", "1"]), ("value", ["25.5", "100", "1"])):
        asked = ["search", run, "a kitchen with a door", "--policy", policy]
        found = rows(ask(*asked))
        assert [row[1] for row in found] == scores
        assert [row[1] for row in rows(ask(*asked, "-n", 1))] == scores[:1]
        assert {row[1]: row[0] for row in found}["100"] == "1.00"
    lines = ask("search", run, "quantum chromodynamics", "--scope", "variation=1")
    assert re.fullmatch(r"no tip has a cosine above 0\.5; the highest is -?0\.\d\d:", lines[0])
    assert [row[1] for row in rows(lines)] == ["25.5"]
    assert state_of(run) == before


def test_stats(run: Path, ask: Ask) -> None:
    lines = ask("stats", run)
    assert re.search(r"memory.sqlite: 0\.\d MB, keys of words \(32 dimensions\)", lines[0])
    words = [line.split() for line in lines]
    # hits 5 of 12 searches; returns 1, -1, 0
    assert ["task=find-plant,variation=0", "2", "2", "1", "3", "42%", "0.00"] in words
    assert ["task=find-plant,variation=1", "1", "1", "0", "0"] in words
    assert ["all", "4", "4", "1", "3", "42%", "0.00"] in words
    assert ["tips", "found", "2", "0.00", "0.00", "-1.00", "1.00", "50%"] in words
    assert ["none", "found", "1", "0.00", "0.00", "0.00", "0.00", "0%"] in words
    # Q: -0.5, -0.25, 0, 0.5
    assert "Q of 4 tips: least -0.50, quartiles -0.31 -0.12 0.12, most 0.50" in lines
    assert "never shown: 2 of 4 tips (50%)" in lines
    assert max(map(len, lines[1:])) <= 80
    alone = ask("stats", run, "--scope", "variation=1")  # one tip, which was never shown; no plays
    said = ["Q of 1 tips: least 0.00, quartiles 0.00 0.00 0.00, most 0.00", "never shown: 1 of 1 tips (100%)"]
    assert [line for line in alone[-3:] if line] == said


def test_an_empty_memory(tmp_path: Path, ask: Ask) -> None:
    file = tmp_path / "memory.sqlite"
    MemoryStore(file, embedder="words", dimension=32).close()
    assert ask("show", file) == ask("search", file, "a door") == ["no tips yet"]
    assert "keys of words" in ask("stats", file)[0]
    assert [json.loads(line)["kind"] for line in ask("export", file)] == ["meta"]
    assert ask("prune", file, "--never-shown", "--yes") == ["0 of 0 tips removed"]


def test_a_scope_is_found_as_it_is_shown(tmp_path: Path, ask: Ask) -> None:
    file, scope = tmp_path / "commas.sqlite", json.dumps({"task": "find, then eat", "variation": 1})
    with closing(MemoryStore(file, embedder="words", dimension=32)) as store:
        add(store, "a", ("s", Words("words").embed(["s"])[0]), scope=scope, tip="Look.")
    assert len(rows(ask("show", file, "--scope", "task=find, then eat,variation=1"))) == 1


def test_export_and_import(run: Path, tmp_path: Path, ask: Ask) -> None:
    lines = ask("export", run)
    assert [json.loads(line)["kind"] for line in lines] == ["meta", *["tip"] * 4, "state", *["play"] * 3]
    file, new = tmp_path / "tips.jsonl", tmp_path / "new.sqlite"
    assert ask("export", run, "--output", file) == []
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() == "".join(line + "\n" for line in lines)
    (said,) = ask("import", file, new, "--embedder", "bigger")
    assert said.endswith("new.sqlite: 4 tips added (0 known), visits of 1 states, 3 plays (0 known)")
    meta, *rest = ask("export", new)
    assert rest == lines[1:]
    assert json.loads(meta) == json.loads(lines[0]) | {"embedder": "bigger", "dimension": 48}
    (said,) = ask("import", file, run)
    assert said.endswith("0 tips added (4 known), visits of 1 states, 0 plays (3 known)")
    ask("import", file, tmp_path / "papers.sqlite")
    assert json.loads(ask("export", tmp_path / "papers.sqlite")[0])["embedder"] == "all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("conditions", "removed"),
    [
        (["--score-below", "25.5"], {1, 4}),
        (["--value-below", "0"], {2, 4}),
        (["--never-shown"], {3, 4}),
        (["--older-than", "90m"], {2, 3, 4}),
        (["--never-shown", "--scope", "task=find-plant"], {3}),
        (["--score-below", "-60"], set()),
    ],
)
def test_prune(run: Path, ask: Ask, conditions: list[str], removed: set[int]) -> None:
    before = state_of(run)
    total = 3 if "--scope" in conditions else 4
    lines = ask("prune", run, *conditions)
    assert lines[0] == f"{len(removed)} of {total} tips would be removed; nothing is, without --yes"
    assert len(rows(lines)) == len(removed) if removed else len(lines) == 1
    assert state_of(run) == before
    assert ask("prune", run, *conditions, "--yes") == [f"{len(removed)} of {total} tips removed"]
    assert set(ids(run / "memory.sqlite")) == {1, 2, 3, 4} - removed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("show run --scope task=find-plants", "--scope task=find-plants: there is no such scope; the nearest is"),
        *((f"{verb} TAKEN", "not a database") for verb in ("show", "stats", "export")),
        ("search TAKEN door", "not a database"),
        ("prune TAKEN --never-shown --yes", "not a database"),
        ("import EXPORT TAKEN", "not a database"),
        ("show .", "a folder without memory.sqlite; give a memory file"),
        ("show nowhere/memory.sqlite", "there is no such file"),
        ("export run --output TAKEN", "exists already; give a new file"),
        ("export run --output nowhere/tips.jsonl", "--output nowhere/tips.jsonl: there is no folder nowhere"),
        ("import nowhere.jsonl run", "nowhere.jsonl"),
        ("import TAKEN run", "line 1: Invalid JSON"),
        ("import EXPORT run --embedder other", "--embedder other: run/memory.sqlite has keys of 'words'; give a new"),
        ("import EXPORT new.sqlite --embedder no/such/model", "does not load: no network"),
        ("import EXPORT nowhere/new.sqlite", "there is no folder nowhere"),
        ("prune run --yes --scope variation=1", "give at least one of --score-below"),
        ("prune run --older-than 7 --yes", "'7' is not an age; give 30m, 12h, 7d or 2w"),
    ],
)
def test_wrong_arguments(run: Path, tmp_path: Path, ask: Ask, arguments: str, words: str) -> None:
    (tmp_path / "TAKEN").write_text("a poem " * 100)
    ask("export", run, "--output", "EXPORT")
    before = state_of(tmp_path)
    assert words in ask(*arguments.split(), refused=True)[0]
    assert state_of(tmp_path) == before


def test_a_live_memory_is_not_changed(run: Path, ask: Ask) -> None:
    ask("export", run, "--output", "tips.jsonl")
    with closing(MemoryStore(run / "memory.sqlite", embedder="words", dimension=32)):
        for arguments in ("prune run --never-shown --yes", "import tips.jsonl run"):
            assert "is in use by another process" in ask(*arguments.split(), refused=True)[0]
    assert ids(run / "memory.sqlite") == [1, 2, 3, 4]


def test_a_model_that_has_changed_is_not_searched_with(run: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_command, "SentenceEmbedder", lambda name: Words("bigger"))
    (said,) = ask("search", run, "a door", refused=True)
    assert "keys have 32 dimensions, those of 'words' now have 48" in said


def test_a_reader_that_goes_away(run: Path) -> None:
    """As `empo2 memory export | head`, of more than a pipe holds."""
    embedder = Words("words")
    with closing(MemoryStore(run / "memory.sqlite", embedder="words", dimension=32)) as store:
        add(store, "long", ("s" * 500_000, embedder.embed(["s"])[0]), scope=PLANT0)
    command = [sys.executable, "-m", "empo2.recipe.cli", "memory", "export", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as export:
        assert export.stdout and export.stderr
        assert json.loads(export.stdout.readline())["kind"] == "meta"
        export.stdout.close()
        assert export.stderr.read() == ""
        assert export.wait(60) == 0


def test_values_and_similarities_of_a_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.sqlite"
    with closing(MemoryStore(file, embedder="words", dimension=2)) as store:
        for number, key in enumerate(([1, 0], [0.6, 0.8], [0, 1])):
            add(store, f"e{number}", (f"state {number}", np.array(key, np.float32)), success=False)
        for number, score in enumerate((100, 0, 100)):
            play(store, f"p{number}", [1], score=score, success=score == 100, reward=score / 100, learning_rate=0.3)
    memory_values.app(["similarities", str(file)], standalone_mode=False)
    said = capsys.readouterr().out
    assert "3 first states, 3 pairs" in said
    # 0.6, 0 and 0.8: a variance of 1/3 - (1.4/3)²; a fifth lies above 0.6 of the way from 0.6 to 0.8
    assert "memory.min_similarity=0.720 memory.similarity_statistics='[0.467, 0.340]'" in said
    memory_values.app(["values", str(file), "--returns", "-100", "100"], standalone_mode=False)
    said = capsys.readouterr().out
    assert re.search(r"0\.00 … 0\.03 +1 +0\.00 +100%", said)
    assert "of the 3 uses" in said
    with pytest.raises(ConfigError, match="learned with another rate or range"):
        memory_values.app(["values", str(file), "--returns", "-100", "100", "--learning-rate", "0.5"])


def test_a_checkpoint_whose_memory_was_changed_is_complete_with_it(run: Path, ask: Ask) -> None:
    checkpoint = run / "checkpoints" / "global_step_4"
    checkpoint.mkdir(parents=True)
    shutil.copy2(run / "memory.sqlite", checkpoint)
    mark_complete(checkpoint)
    exported = run.parent / "tips.jsonl"
    ask("export", str(run), "--output", str(exported))
    (note,) = [line for line in ask("prune", str(run), "--never-shown", "--yes") if line.startswith("note")]
    assert f"it takes the memory of {checkpoint}" in note
    assert "note" not in " ".join(ask("prune", str(checkpoint), "--never-shown", "--yes"))
    before = (checkpoint / "memory.sqlite").stat().st_size
    lines = exported.read_text().splitlines()
    tip = next(json.loads(line) for line in lines if '"tip"' in line)
    more = [json.dumps(tip | {"episode": f"e{number}", "text": f"tip {number}"}) for number in range(900)]
    exported.write_text("\n".join([*lines, *more]))
    ask("import", str(exported), str(checkpoint))
    assert (checkpoint / "memory.sqlite").stat().st_size > before and damage_of(checkpoint) == ""
    assert json.loads((checkpoint / "complete").read_text()).keys() == {"memory.sqlite"}  # its lock is no part of it


def test_a_runs_memory_is_searched_by_its_settings(run: Path, ask: Ask) -> None:
    asked = ("search", str(run), "a kitchen with a door", "-n", "1")
    assert "garden" in " ".join(ask(*asked))
    (run / "config.yaml").write_text("memory: {min_similarity: 0.99, retrieval: similarity}")
    assert "no tip has a cosine above 0.99" in ask("search", str(run), "a kitchen")[0]
    assert "alert" not in " ".join(ask(*asked)) and "garden" in " ".join(ask(*asked, "--policy", "score"))
