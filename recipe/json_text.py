"""JSON as bytes, written by orjson; and read with all that it cannot carry refused."""

import json
from typing import Any

import orjson
from pydantic_core import from_json


def dumped(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return a value as compact JSON in UTF-8; an object that JSON does not have is written as its text.

    Raises:
        UnicodeError: half of a surrogate pair.
    """
    try:
        return orjson.dumps(value, str, orjson.OPT_SORT_KEYS if sort_keys else 0)
    except TypeError:  # orjson writes no integer beyond 64 bits, and nothing nested deeper than 254
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, default=str)
        return text.encode()


def loaded(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: not JSON, nested deeper than 200, or with something that JSON cannot carry: NaN, a number beyond a
            double's range, half of a surrogate pair. The message says which and holds nothing of the text.
    """
    value = from_json(text, allow_inf_nan=False)
    orjson.loads(text)  # refuses numbers beyond a double's range; but it reads large integers as floats
    return value
