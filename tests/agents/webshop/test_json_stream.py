"""Entries of JSON files piece by piece: the same as Python's json reads at once."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from empo2.agents.webshop import json_stream
from empo2.agents.webshop.json_stream import read_json

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
layout = st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False, "separators": (",", ":")}])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.json"


@given(
    data=st.lists(value, max_size=4) | st.dictionaries(text, value, max_size=4), layout=layout, chunk=st.integers(1, 9)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_data_in_chunks_of_any_size(file: Path, data: list | dict, layout: dict, chunk: int):
    file.write_text(json.dumps(data, **layout) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "CHUNK", chunk)
        if isinstance(data, list):
            assert list(read_json(file, "array")) == data
        else:
            assert [tuple(pair) for pair in read_json(file, "object")] == list(data.items())


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("document", ['[{"a": "x, ]"}, 12, "ü"]', '{"a": [1, {"b": "}"}], "ü": 12}'])
def test_a_document_that_ends_anywhere_too_early_is_damaged(file: Path, monkeypatch, document: str, chunk: int):
    monkeypatch.setattr(json_stream, "CHUNK", chunk)
    whole = document.encode()
    for end in range(1, len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"data\.json is damaged or cut short: .*; get it anew") as error:
            list(read_json(file, "array" if document[0] == "[" else "object"))
        assert "\n" not in str(error.value)


ARRAYS = ["[1 2]", "[1,]", "[,]", "[}", "[1}", "[1], 2", "[1] x", "[01]", "['a']", '["\n"]', '["\xff"]', "[" * 100_000]
OBJECTS = ["{]", '{"a" 1}', '{"a"}', "{1: 2}", '{"a": 1,}', "{null: 1}"]


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([*ARRAYS, *OBJECTS], "is damaged or cut short"),
        (
            ["", "<html>404</html>", "17", '{"a": 1}', "PK\x03\x04"],
            r"data\.json holds no JSON array: is it the right one",
        ),
    ],
)
def test_what_json_refuses_and_files_of_another_kind_are_named_in_one_line(file: Path, documents: list, says: str):
    for document in documents:
        file.write_bytes(document.encode("latin-1"))
        with pytest.raises(ValueError, match=says) as error:
            list(read_json(file, "object" if document in OBJECTS else "array"))
        assert "\n" not in str(error.value), document[:9]


def test_a_file_that_cannot_be_read_is_named(file: Path):
    for path, says in ((file, "No such file or directory"), (file.parent, "Is a directory")):
        with pytest.raises(ValueError, match=f"{path.name} cannot be read: {says}"):
            list(read_json(path, "array"))


def test_what_stream_parsers_refuse(file: Path):
    file.write_text('[NaN, -Infinity, 1e999, 123456789012345678901234567890, "\\ud83d\\ude00", "half \\uD83D"]')
    nan, *rest = read_json(file, "array")
    assert math.isnan(nan)
    assert rest == [-math.inf, math.inf, 123456789012345678901234567890, "😀", "half ?"]


def test_entries_come_before_the_file_is_read_to_its_end(file: Path, monkeypatch):
    monkeypatch.setattr(json_stream, "CHUNK", 10)
    file.write_text('["first", "second", broken')
    entries = read_json(file, "array")
    assert next(entries) == "first"
    assert next(entries) == "second"
    with pytest.raises(ValueError, match="damaged"):
        next(entries)


def test_an_entry_without_an_end_does_not_fill_the_memory(file: Path, monkeypatch):
    monkeypatch.setattr(json_stream, "CHUNK", 10)
    monkeypatch.setattr(json_stream, "ENTRY_LIMIT", 100)
    file.write_text(json.dumps(["a" * 90]))
    assert list(read_json(file, "array")) == ["a" * 90]
    file.write_text(json.dumps(["a" * 10_000]))
    with pytest.raises(ValueError, match="damaged"):
        list(read_json(file, "array"))
