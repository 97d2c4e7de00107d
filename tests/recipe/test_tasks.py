"""The tasks that a run trains and validates on: of a function, from files and from the hub; what is refused."""

import datetime
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.run_directory import write_settings
from empo2.recipe.files.tasks import Tasks, load_tasks, read_tasks

ROWS: list[dict[str, Any]] = [{"question": f"{n}²?", "answer": n * n, "hints": ["no"]} for n in range(25)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_every_tenth_row_validates_unless_there_is_a_file_for_it(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("\n".join([json.dumps(row, ensure_ascii=False) for row in ROWS] + ["", ""]))
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    settings = ["memory.scope=[question]", "algorithm.tasks_per_step=1", "algorithm.updates_per_step=1"]
    loaded = load_tasks(load_settings("cpu", [f"tasks.source={file}", *settings]))
    assert loaded.val == [ROWS[0], ROWS[10], ROWS[20]]
    assert loaded.train == [*ROWS[1:10], *ROWS[11:20], *ROWS[21:]]
    assert read_tasks(str(file), most_validation_tasks=1) == (ROWS[1:], ROWS[:1])
    assert read_tasks(str(file), validation=str(file), most_validation_tasks=2) == (ROWS, ROWS[:2])


def test_files_without_tasks_are_refused(tmp_path: Path) -> None:
    for name, text, message in (
        ("x.jsonl", '{"a": 1}\n{"a": ', r"x\.jsonl': line 2 is not JSON"),
        ("x.jsonl", '{"a": 1}\n\n[1]', r"x\.jsonl': line 3 is not an object"),
        ("x.jsonl", '{"a": 1}', r"x\.jsonl': has 1 rows; give two or more"),
        ("x.jsonl", '{"a": 1}\n' + "[" * 100_000, r"x\.jsonl': line 2 is not JSON"),
        ("x.json", '{"a": 1}', r"x\.json': must be a list of objects"),
        ("x.json", "[", r"x\.json': not JSON"),
        ("x.csv", "a,b\n1,2\n3\n", r"x\.csv': row 2 has not as many values as the first line has names"),
        ("x.csv", 'a\n"1\n', r"x\.csv': line 2 is not CSV"),
        ("x.parquet", "no parquet", r"x\.parquet': .*[Pp]arquet"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_tasks(str(tmp_path / name))
    table = pyarrow.Table.from_pylist([{"day": datetime.date(2026, 1, 1)}] * 2)
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"row 0 is not JSON-like: Object of type date"):
        load_tasks(load_settings("cpu", [f"tasks.source={tmp_path / 'x.parquet'}"]))
    with pytest.raises(ConfigError, match=r"tasks\.args\.validation='none\.csv': No such file"):
        read_tasks(str(Path(__file__).parents[2] / "examples/quiz/questions.jsonl"), validation="none.csv")
    with pytest.raises(ConfigError, match=r"tasks\.args\.validation='x\.txt': give a \.jsonl, \.json, \.csv, \.p"):
        read_tasks(str(Path(__file__).parents[2] / "examples/quiz/questions.jsonl"), validation="x.txt")
    with pytest.raises(ConfigError, match=r"tasks\.args=\{'valdation': 'x'\}: .*unexpected keyword"):
        load_tasks(load_settings("cpu", ["tasks.source=x.jsonl", "tasks.args.valdation=x"]))


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*arguments: Any, **options: Any) -> datasets.Dataset:
        asked.append((*arguments, options["split"]))
        return datasets.Dataset.from_list(ROWS[:3])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_tasks("hub:openai/gsm8k", config="main", validation="test") == (ROWS[:3], ROWS[:3])
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the\nhub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    unreached = r"^tasks\.source='hub:openai/gsm8k': .*\(ConnectionError: Couldn't reach the hub\); .*give a file"
    with pytest.raises(ConfigError, match=unreached):
        read_tasks("hub:openai/gsm8k")


TRAIN = [{"task": "a", "variation": 0}, {"task": "a", "variation": 1}]
VAL: list[dict[str, Any]] = [{"task": "a", "variation": 7}, {"task": "b", "variation": 0, "panel": "far"}]


def test_tasks_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, though a step needs more; a panel that a row names stays."""
    module: Any = ModuleType("made_tasks")
    module.load = lambda: (TRAIN, VAL)
    monkeypatch.setitem(sys.modules, "made_tasks", module)
    made = ["tasks.source=made_tasks:load", "memory.scope=[task, variation]", "algorithm.tasks_per_step=3"]

    def loaded(*options: str) -> Tasks:
        return load_tasks(load_settings("cpu", [*made, *options]))

    assert loaded() == Tasks(TRAIN * 2, VAL)
    panels = [{**VAL[0], "panel": "unseen"}, VAL[1], *({**row, "panel": "train"} for row in TRAIN)]
    assert loaded("run.validate_training_tasks=true") == Tasks(TRAIN * 2, panels)
    module.load = lambda: (TRAIN, [{"task": "a"}])
    assert loaded().val == [{"task": "a"}]
    module.load = lambda: (["a b"], VAL)
    with pytest.raises(ConfigError, match=r"tasks\.source='made_tasks:load': row 0 is not JSON-like: dict"):
        loaded()
    module.load = lambda: (TRAIN, [{"task": "a", "day": datetime.date(2026, 1, 1)}])
    with pytest.raises(ConfigError, match=r"row 0 is not JSON-like: Object of type date"):
        loaded()
    module.load = lambda: (TRAIN, [{"task": "a", "hint": math.nan}])  # as pandas has what is missing
    with pytest.raises(ConfigError, match=r"row 0 is not JSON-like: Out of range float values"):
        loaded()
    module.load = lambda: (TRAIN, [{"task": "half a pair \ud83d"}])
    with pytest.raises(ConfigError, match=r"row 0 is not JSON-like: .*surrogates not allowed"):
        loaded()
    module.load = lambda: (TRAIN, [{"task": "a"}])
    with pytest.raises(ConfigError, match=r"memory\.scope.*no field 'variation'"):
        loaded("run.validate_with_memory=true")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_json_end_with_a_newline_and_nothing_else(tmp_path: Path, end: str) -> None:
    """Other separators of lines may stand in texts, and a byte-order mark before them all."""
    texts = [f"one{mark}two" for mark in "\u2028\u2029\u0085\x0b\x0c\x1c"]
    lines = [json.dumps({"text": text}, ensure_ascii=False).replace("\\u000b", "\\u000B") for text in texts]
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + end.join([*lines, ""]).encode())
    train, val = read_tasks(str(tmp_path / "x.jsonl"))
    assert [row["text"] for row in [*val, *train]] == texts


def test_values_of_csv_are_texts(tmp_path: Path) -> None:
    """As a spreadsheet writes them: a byte-order mark, quotes, a line within a value."""
    (tmp_path / "x.csv").write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"1, or\n2?",07\r\n3?,\r\n')
    train, val = read_tasks(str(tmp_path / "x.csv"))
    assert [*val, *train] == [{"question": "1, or\n2?", "answer": "07"}, {"question": "3?", "answer": ""}]


def test_a_file_of_settings_names_tasks_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current folder is; an argument names them from there. So does a run's copy of the settings."""
    (tmp_path / "mine").mkdir()
    for name in ("here.csv", "val.csv"):
        (tmp_path / "mine" / name).write_text("question\n1\n2\n")
    settings = tmp_path / "mine/empo2.yaml"
    settings.write_text("tasks: {source: here.csv, args: {validation: val.csv}}\nmemory: {scope: [question]}\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_settings("cpu", file=Path("mine/empo2.yaml"))
    assert load_tasks(loaded).val == [{"question": "1"}, {"question": "2"}]
    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    write_settings(loaded, run)
    monkeypatch.chdir(run)
    assert (
        load_tasks(load_settings(file=run / "config.yaml")).train
        == load_tasks(load_settings("cpu", file=settings)).train
    )
    with pytest.raises(ConfigError, match=r"tasks\.source='here\.csv': No such file"):
        load_tasks(load_settings("cpu", ["tasks.source=here.csv"], file=settings))
