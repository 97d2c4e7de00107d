"""Read the entries of large JSON files one by one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

CHUNK = 1 << 20  # characters
ENTRY_LIMIT = 1 << 24  # characters; no product comes near it, so an entry without an end is damaged

_DECODER = json.JSONDecoder()
_SURROGATE = re.compile(r"\\u[dD]")


def read_json(file: Path, top: Literal["array", "object"]) -> Iterator[Any]:
    """Yield the values of the array, or the (key, value) pairs of the object, in a JSON file, in bounded memory.

    Accepts everything that Python's json accepts, including NaN, which stream parsers refuse. Lone surrogates, which
    neither a database nor a request can hold, become "?".

    Raises ValueError, naming the file, if it is missing, damaged, or holds something else.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(CHUNK).lstrip()
            if text[:1] != ("[" if top == "array" else "{"):
                raise ValueError(f"{file} holds no JSON {top}: is it the right one of WebShop's files, unpacked?")
            yield from _entries(stream, text[1:], top)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{file} is damaged or cut short: {reason}; get it anew") from None


def _entries(stream: TextIO, text: str, top: str) -> Iterator[Any]:
    """Yield the entries in `text` and the rest of the stream, which start after the opening bracket."""
    begin, between, end = (r"\s*", None, r"\s*([,\]])") if top == "array" else (r'\s*(?=")', r"\s*:\s*", r"\s*([,}])")
    position, delimiter = 0, ","
    while not text.strip() and (more := stream.read(CHUNK)):
        text = more
    if (empty := re.match(end, text)) and empty[1] != ",":
        position, delimiter = empty.end(), empty[1]
    while delimiter == ",":
        try:
            entry, behind = _DECODER.raw_decode(text, _skip(begin, text, position).end())
            if between:
                value, behind = _DECODER.raw_decode(text, _skip(between, text, behind).end())
                entry = (entry, value)
            found = _skip(end, text, behind)
        except json.JSONDecodeError:
            # Perhaps cut off by the end of `text`, which then doubles, so that a long entry is not parsed too often.
            rest = text[position:]
            more = stream.read(max(CHUNK, len(rest))) if len(rest) < ENTRY_LIMIT else ""
            if not more:
                raise
            text, position = rest + more, 0
            continue
        if _SURROGATE.search(text, position, behind):
            entry = json.loads(json.dumps(entry, ensure_ascii=False).encode(errors="replace"))
        delimiter, position = found[1], found.end()
        yield entry
    if text[position:].strip() or stream.read(CHUNK).strip():
        raise json.JSONDecodeError("Extra data", text, position)


def _skip(pattern: str, text: str, position: int) -> re.Match[str]:
    if match := re.compile(pattern).match(text, position):
        return match
    raise json.JSONDecodeError("A comma, colon, quote or bracket is missing", text, position)
