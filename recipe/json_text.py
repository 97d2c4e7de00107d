"""JSON as bytes, written by orjson."""

import json
from typing import Any

import orjson


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
