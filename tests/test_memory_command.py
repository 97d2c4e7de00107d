"""``empo2 memory``: what it shows, what it changes, and one clear line for what it cannot do."""

import hashlib
import json
import re
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from empo2.memory import EmbedderError, MemoryStore, SentenceEmbedder, Step, Visit
from empo2.recipe.cli import main
from empo2.recipe.cli import memory as memory_command
from empo2.recipe.cli.memory_tables import value_lines

PLANT0, PLANT1 = (json.dumps({"task": "find-plant", "variation": number}) for number in (0, 1))
ODD = "no JSON \x1b[31m at all"
VERBS = ("show", "search", "stats", "values", "similarities", "export", "import", "prune")


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


def make_memory(file: Path, embedder: Words | SentenceEmbedder) -> Path:
    now = time.time()
    with closing(MemoryStore(file, embedder=embedder.name, dimension=embedder.dimension)) as store:
        for episode, scope, tip, score, success, age, value, state in [
            ("low", PLANT0, "Do not eat [bold]the plant[/bold].", -50, False, 30, 0, "outside near some plants"),
            ("high", PLANT0, "The plant is in the garden.", 100, True, 7200, 0, "a kitchen with a door"),
            ("other", PLANT1, "Open the door first: " + "go on " * 40, 25.5, None, 864_000, 0, "a kitchen with a door"),
            ("odd", ODD, "red \x1b[31m alert\nand more", 1, None, 86_400, -0.5, "a kitchen with a window"),
        ]:
            steps = [Step(state, embedder.embed([state])[0], "go")]
            store.add_episode(
                scope, episode, tip=tip, score=score, success=success, steps=steps, created=now - age, value=value
            )
        for episode, score, shown, hits in [("p", 1.0, {1: 4, 2: 1}, 3), ("q", -1.0, {2: 2}, 2), ("r", 0.0, {}, 0)]:
            store.record_play(
                PLANT0,
                episode,
                score=score,
                success=score > 0,
                searches=4,
                hits=hits,
                shown=shown,
                reward=score,
                learning_rate=0.5,
            )
        store.states.add_visits([Visit(PLANT0, "a garden", embedder.embed(["a garden"])[0])], threshold=0.9)
    return file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with its memory."""
    (tmp_path / "run").mkdir()
    make_memory(tmp_path / "run" / "memory.sqlite", Words("words"))
    return tmp_path / "run"


type Ask = Callable[..., list[str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Lines that a verb prints, and that it does, without a word on the side."""

    def ask(*arguments: object) -> list[str]:
        assert main(["memory", *map(str, arguments)]) == 0
        output, errors = capsys.readouterr()
        assert errors == "" or arguments[0] == "import"
        assert "\x1b" not in output
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


@pytest.mark.parametrize(
    ("order", "scores"),
    [
        ("best", ["100", "25.5", "1", "-50"]),
        ("newest", ["-50", "100", "1", "25.5"]),
        ("used", ["100", "-50", "25.5", "1"]),
        ("value", ["-50", "25.5", "100", "1"]),
    ],
)
def test_show_orders(run: Path, ask: Ask, order: str, scores: list[str]) -> None:
    lines = ask("show", run, "--order", order)
    assert [row[0] for row in rows(lines)] == scores
    assert [row[0] for row in rows(ask("show", run, "--order", order, "-n", 2))] == scores[:2]
    assert max(map(len, lines)) <= 80


def test_show_of_one_scope(run: Path, ask: Ask) -> None:
    lines = ask("show", run / "memory.sqlite", "--scope", "task=find-plant,variation=0")
    assert lines[0].strip() == "task=find-plant,variation=0"
    # Q of "high": 0 -> 0.5 (reward 1) -> -0.25 (reward -1), each with a learning rate of 0.5
    assert [line.split(maxsplit=6) for line in lines if line.startswith(("  100", "  -50"))] == [
        ["100", "yes", "-0.25", "2", "2", "h", "The plant is in the garden."],
        ["-50", "no", "0.50", "1", *lines[5].split()[4:6], "Do not eat [bold]the plant[/bold]."],
    ]


def test_show_names_the_scopes_of_several_and_steers_no_terminal(run: Path, ask: Ask) -> None:
    text = "\n".join(ask("show", run))
    assert re.search(r"100 +yes +-0.25 +2 +2 h +find-plant 0\n +The plant is in the garden\.", text)
    assert re.search(r"no JSON �\[31m at all\n +red �\[31m alert and more", text)


@pytest.mark.parametrize(
    ("scope", "scores"),
    [
        (PLANT1, ["25.5"]),
        ('{"variation": 1, "task": "find-plant"}', ["25.5"]),
        ('{"task": "find-plant"}', ["100", "25.5", "-50"]),
        ("variation=0", ["100", "-50"]),
        ("variation=1,task=find-plant", ["25.5"]),
        (ODD, ["1"]),
    ],
)
def test_scopes_by_their_fields(run: Path, ask: Ask, scope: str, scores: list[str]) -> None:
    assert [row[0] for row in rows(ask("show", run, "--scope", scope))] == scores


def test_a_live_run_is_shown_and_not_disturbed(run: Path, ask: Ask) -> None:
    embedder, file = Words("words"), run / "memory.sqlite"
    with closing(MemoryStore(file, embedder=embedder.name, dimension=embedder.dimension)) as store:
        steps = [Step("s", embedder.embed(["s"])[0], "go")]
        store.add_episode(PLANT1, "live", tip="From the log.", score=7, success=None, steps=steps)
        before = state_of(run)
        for verb, *more in (["show"], ["export"], ["search", "s"], ["prune", "--never-shown"]):
            assert "From the log." in "\n".join(ask(verb, run, *more))
        assert ["task=find-plant,variation=1", "2", "2", "0", "0"] in [line.split() for line in ask("stats", run)]
        assert state_of(run) == before
        assert store.add_episode(PLANT1, "next", tip="On we go.", score=7, success=None, steps=steps) == 1


@pytest.mark.parametrize(
    ("policy", "scores"),
    [("score", ["100", "25.5", "1"]), ("similarity", ["100", "25.5", "1"]), ("value", ["25.5", "100", "1"])],
)
def test_search(run: Path, ask: Ask, policy: str, scores: list[str]) -> None:
    """Tips of a kitchen with a door (cosine 1) and with a window; the garden is too far away, whatever its score."""
    before = state_of(run)
    found = rows(ask("search", run, "a kitchen with a door", "--policy", policy))
    assert [row[1] for row in found] == scores
    assert [row[1] for row in rows(ask("search", run, "a kitchen with a door", "--policy", policy, "-n", 1))] == scores[
        :1
    ]
    assert {row[1]: row[0] for row in found}["100"] == "1.00"
    assert state_of(run) == before


def test_search_without_success_says_what_is_nearest(run: Path, ask: Ask) -> None:
    lines = ask("search", run, "quantum chromodynamics", "--scope", "variation=1")
    assert re.fullmatch(r"no tip has a cosine above 0\.5; the highest is -?0\.\d\d:", lines[0])
    assert [row[1] for row in rows(lines)] == ["25.5"]


def test_search_with_the_real_embedder(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    minilm = SentenceEmbedder("all-MiniLM-L6-v2")
    monkeypatch.setattr(memory_command, "SentenceEmbedder", lambda name: minilm if name == minilm.name else None)
    file = make_memory(tmp_path / "memory.sqlite", minilm)
    lines = ask("search", file, "You are outside, and there are plants.", "--policy", "similarity", "-n", 1)
    ((cosine, score, *_),) = rows(lines)
    assert score == "-50" and 0.5 < float(cosine) < 1


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
    assert [line.split()[::2] for line in lines if "█" in line] == [
        [low, "1"] for low in ("-0.50", "-0.30", "0.00", "0.40")
    ]
    assert "never shown: 2 of 4 tips (50%)" in lines
    assert [row[0] for row in rows(lines[lines.index("most shown:") :])] == ["100", "-50"]
    assert max(map(len, lines[1:])) <= 80 and "variation=1" not in "\n".join(
        ask("stats", run, "--scope", "variation=0")
    )


def test_the_histogram_of_values() -> None:
    first, *bars, last = value_lines(np.array([1.0, 0, 0, 2, 0]))
    assert first == "Q of 5 tips: least 0.00, quartiles 0.00 0.00 1.00, most 2.00"
    assert bars == [
        f"{low:>8.2f}  {'█' * length} {count}"
        for low, length, count in zip(
            np.arange(10) / 5, [40, 0, 0, 0, 0, 14, 0, 0, 0, 14], [3, 0, 0, 0, 0, 1, 0, 0, 0, 1], strict=True
        )
    ]
    assert last.strip() == "2.00"
    assert value_lines(np.array([2.0, 2.0 + 1e-15])) == ["Q of 2 tips: least 2.00, quartiles 2.00 2.00 2.00, most 2.00"]


def test_an_empty_memory(tmp_path: Path, ask: Ask) -> None:
    file = tmp_path / "memory.sqlite"
    MemoryStore(file, embedder="words", dimension=32).close()
    assert ask("show", file) == ask("search", file, "a door") == ["no tips yet"]
    assert "keys of words" in ask("stats", file)[0]
    assert [json.loads(line)["kind"] for line in ask("export", file)] == ["meta"]
    assert ask("prune", file, "--never-shown", "--yes") == ["0 of 0 tips removed"]


def test_export_and_import(run: Path, tmp_path: Path, ask: Ask) -> None:
    lines = ask("export", run)
    assert [json.loads(line)["kind"] for line in lines] == ["meta", *["tip"] * 4, "state", *["play"] * 3]
    file, new = tmp_path / "tips.jsonl", tmp_path / "new.sqlite"
    assert ask("export", run, "--output", file) == []
    assert file.read_text() == "".join(line + "\n" for line in lines)
    (said,) = ask("import", file, new, "--embedder", "bigger")
    assert said.endswith("new.sqlite: 4 tips added (0 known), visits of 1 states, 3 plays (0 known)")
    meta, *rest = ask("export", new)
    assert rest == lines[1:]
    assert json.loads(meta) == json.loads(lines[0]) | {"embedder": "bigger", "dimension": 48}
    (said,) = ask("import", file, run)
    assert said.endswith("0 tips added (4 known), visits of 1 states, 0 plays (3 known)")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["run", "tips.jsonl", *(path.name for path in tmp_path.glob("new.sqlite*"))]
    )


def test_import_takes_the_paper_s_embedder_for_a_new_memory(run: Path, tmp_path: Path, ask: Ask) -> None:
    ask("export", run, "--output", tmp_path / "tips.jsonl")
    ask("import", tmp_path / "tips.jsonl", tmp_path / "new.sqlite")
    assert json.loads(ask("export", tmp_path / "new.sqlite")[0])["embedder"] == "all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("conditions", "removed"),
    [
        (["--score-below", "25.5"], {1, 4}),
        (["--value-below", "0"], {2, 4}),
        (["--never-shown"], {3, 4}),
        (["--older-than", "90m"], {2, 3, 4}),
        (["--older-than", "2d"], {3}),
        (["--never-shown", "--score-below", "2"], {4}),
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


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that says why."""
    code = main(["memory", *map(str, arguments)])
    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("empo2: error: ")
    return line


def with_words(verb: str, memory: Path, tmp_path: Path) -> list[object]:
    """A verb's arguments, right but for the memory."""
    match verb:
        case "search":
            return [verb, memory, "a door"]
        case "import":
            file = tmp_path / "tips.jsonl"
            file.write_text('{"kind": "meta", "schema": 2, "embedder": "words", "dimension": 32}\n')
            return [verb, file, memory]
        case "prune":
            return [verb, memory, "--score-below", "9", "--yes"]
        case "export":
            return [verb, memory, "--output", tmp_path / "output.jsonl"]
    return [verb, memory]


@pytest.mark.parametrize(
    ("verb", "kind", "words"),
    [
        *((verb, "text", "not a database") for verb in VERBS),
        ("show", "missing", "there is no"),
        ("show", "folder", "a folder without memory.sqlite; give a memory file"),
        ("show", "other", "not a memory file"),
        ("show", "schema", "has memory schema 1"),
        ("show", "truncated", "malformed"),
    ],
)
def test_what_is_no_memory(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, kind: str, words: str
) -> None:
    memory = run / "memory.sqlite"
    match kind:
        case "missing":
            memory = run / "no" / "memory.sqlite"
        case "folder":
            memory = tmp_path
        case "text":
            memory.write_text("a poem " * 1000)
        case "truncated":
            memory.write_bytes(memory.read_bytes()[:10_000])
        case _:
            with closing(sqlite3.connect(memory)) as db, db:
                db.execute("UPDATE meta SET value = 1 WHERE key = 'schema'" if kind == "schema" else "DROP TABLE meta")
    arguments = with_words(verb, memory, tmp_path)
    before = state_of(tmp_path)
    line = refused(capsys, *arguments)
    assert words in line and str(memory) in line
    assert state_of(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "show MEMORY --scope task=find-plants",
            "--scope task=find-plants: there is no such scope; the nearest is",
        ),
        ("show MEMORY --scope {}", "no such scope"),
        ("prune MEMORY --never-shown --scope variation= --yes", "no such scope"),
        ("show MEMORY -n 0", "'-n': Input should be greater than or equal to 1; see empo2 memory show --help"),
        ("show", "Missing argument 'MEMORY'"),
        ("export MEMORY --output TAKEN", "exists already; give a new file"),
        ("export MEMORY --output nowhere/tips.jsonl", "nowhere"),
        ("import nowhere.jsonl MEMORY", "nowhere.jsonl"),
        ("import . MEMORY", "directory"),
        ("import TAKEN MEMORY", "line 1: Invalid JSON"),
        ("import EXPORT MEMORY --embedder other", "--embedder other: MEMORY has keys of 'words'; give a new file"),
        ("import EXPORT new.sqlite --embedder no/such/model", "does not load: no network"),
        ("import EXPORT nowhere/new.sqlite", "there is no folder nowhere"),
        ("prune MEMORY --yes --scope variation=1", "give at least one of --score-below"),
        ("prune MEMORY --score-below nan --yes", "'nan' is not a finite number"),
        ("prune MEMORY --value-below much --yes", "'much' is not a finite number"),
        ("prune MEMORY --older-than 7 --yes", "'7' is not an age; give 30m, 12h, 7d or 2w"),
    ],
)
def test_wrong_arguments(
    run: Path,
    tmp_path: Path,
    ask: Ask,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"MEMORY": str(run / "memory.sqlite"), "TAKEN": "poem.txt", "EXPORT": "export.jsonl"}
    Path("poem.txt").write_text("a poem\n")
    ask("export", run, "--output", "export.jsonl")
    before = state_of(tmp_path)
    line = refused(capsys, *(names.get(word, word) for word in arguments.split()))
    assert words.replace("MEMORY", names["MEMORY"] if "has keys" in words else "MEMORY") in line
    assert state_of(tmp_path) == before


def test_a_live_memory_is_not_changed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(MemoryStore(run / "memory.sqlite", embedder="words", dimension=32)):
        for verb in ("prune", "import"):
            line = refused(capsys, *with_words(verb, run, tmp_path))
            assert "is in use by another process" in line
    assert ids(run / "memory.sqlite") == [1, 2, 3, 4]


def test_a_model_that_has_changed_is_not_searched_with(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_command, "SentenceEmbedder", lambda name: Words("bigger"))
    assert "keys have 32 dimensions, those of 'words' now have 48" in refused(capsys, "search", run, "a door")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    verb=st.sampled_from(VERBS),
    words=st.lists(
        st.sampled_from(["--scope", "-n", "--yes", "MEMORY", "{", "x=1", "--score-below"]) | st.text(max_size=4)
    ),
)
def test_any_words_are_done_or_refused(
    run: Path, capsys: pytest.CaptureFixture[str], verb: str, words: list[str]
) -> None:
    arguments = [str(run / "none" if word == "MEMORY" else word.replace("/", "_").replace("\0", "")) for word in words]
    if {"-h", "--help"} & set(arguments) or any(word.startswith("--h") for word in arguments):
        return
    refused(capsys, verb, *arguments)


def test_a_reader_that_goes_away(run: Path) -> None:
    """As `empo2 memory export | head`, of more than a pipe holds."""
    embedder = Words("words")
    with closing(MemoryStore(run / "memory.sqlite", embedder="words", dimension=32)) as store:
        steps = [Step("s" * 500_000, embedder.embed(["s"])[0], "go")]
        store.add_episode(PLANT0, "long", tip="Long.", score=1, success=None, steps=steps)
    command = [sys.executable, "-m", "empo2.recipe.cli", "memory", "export", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as export:
        assert export.stdout and export.stderr
        assert json.loads(export.stdout.readline())["kind"] == "meta"
        export.stdout.close()
        assert export.stderr.read() == ""
        assert export.wait(60) == 0


def test_looking_loads_no_model(run: Path) -> None:
    code = "import sys; from empo2.recipe.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "memory", "show", str(run)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False" and done.stderr == ""


def test_values_and_similarities_of_a_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.sqlite"
    with closing(MemoryStore(file, embedder="words", dimension=2)) as store:
        for number, key in enumerate(([1, 0], [0.6, 0.8])):
            steps = [Step(f"state {number}", np.array(key, np.float32), "go")]
            store.add_episode("a", f"e{number}", tip=f"tip {number}", score=0, success=False, steps=steps)
        for number, score in enumerate((100, 0, 100)):
            play = {"score": score, "success": score == 100, "reward": score / 100, "learning_rate": 0.3}
            store.record_play("a", f"p{number}", searches=1, hits=1, shown={1: 1}, **play)
    assert main(["memory", "similarities", str(file)]) == 0
    said = capsys.readouterr().out
    assert "2 first states, 1 pairs" in said
    assert "memory.min_similarity=0.600 memory.similarity_statistics='[0.600, 0.000]'" in said
    assert main(["memory", "values", str(file), "--return-scale", "0.01"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"0\.00 … 0\.03 +1 +0\.00 +100%", said)
    assert "of the 3 uses" in said
    assert main(["memory", "values", str(file), "--return-scale", "0.01", "--learning-rate", "0.5"]) == 2
    assert "learned with another rate or scale" in capsys.readouterr().err
