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


ARRAYS = ["[1 2]", "[1,]", "[,]", "[}", "[1}", "[1], 2", "[1] x", "[01]", "['a']", '["\n"]', '["\xff"]', "[" * 100_000]
ARRAYS += ['[{"a": "x, ]"}, 12]'[:end] for end in range(1, 19)]
OBJECTS = ["{]", '{"a" 1}', '{"a"}', "{1: 2}", '{"a": 1,}', "{null: 1}"]
OTHERS = ["", "<html>404</html>", "17", '{"a": 1}', "PK\x03\x04"]


def test_what_json_refuses_and_files_of_another_kind_are_named_in_one_line(file: Path):
    with pytest.raises(ValueError, match=r"data\.json cannot be read: No such file or directory"):
        list(read_json(file, "array"))
    for document in [*ARRAYS, *OBJECTS, *OTHERS]:
        file.write_bytes(document.encode("latin-1"))
        says = "data.json holds no JSON array: is it the right one" if document in OTHERS else "is damaged or cut short"
        with pytest.raises(ValueError, match=says) as error:
            list(read_json(file, "object" if document in OBJECTS else "array"))
        assert "\n" not in str(error.value), document[:9]


def test_what_stream_parsers_refuse(file: Path):
    file.write_text('[NaN, -Infinity, 1e999, 123456789012345678901234567890, "\\ud83d\\ude00", "half \\uD83D"]')
    nan, *rest = read_json(file, "array")
    assert math.isnan(nan)
    assert rest == [-math.inf, math.inf, 123456789012345678901234567890, "😀", "half ?"]


def test_an_entry_without_an_end_does_not_fill_the_memory(file: Path, monkeypatch):
    monkeypatch.setattr(json_stream, "CHUNK", 10)
    monkeypatch.setattr(json_stream, "ENTRY_LIMIT", 100)
    file.write_text(json.dumps(["a" * 90]))
    assert list(read_json(file, "array")) == ["a" * 90]
    file.write_text(json.dumps(["a" * 10_000]))
    with pytest.raises(ValueError, match="damaged"):
        list(read_json(file, "array"))
