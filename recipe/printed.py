"""Make fit to be printed what others wrote: agents, policies, worlds, model servers. Terminals obey some characters."""

import json
import re
import shutil
import sys
import textwrap

# Control characters but for tabs and newlines, halves of surrogate pairs, marks that turn the direction of text, line
# separators, and the tags that show nothing at all.
_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
_LINE_CHARACTERS = 300


def printable(text: str) -> str:
    """Return text with a visible character in the place of each that a terminal would obey."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return text as one short line, without the characters that a terminal would obey."""
    return " ".join(_OBEYED.sub(" ", text).split())[:_LINE_CHARACTERS]


def printable_json(text: str) -> str:
    """Return JSON text of the same meaning, with escapes in the place of the characters that a terminal would obey."""
    return _OBEYED.sub(lambda obeyed: json.dumps(obeyed[0])[1:-1], text)


def say(label: str, text: str) -> None:
    """Print a line of text behind a label; on a terminal it is wrapped, to at most 100 columns."""
    line = f"{label:6} {text}"
    if sys.stdout.isatty():
        width = min(shutil.get_terminal_size().columns, 100)
        line = textwrap.fill(line, width, subsequent_indent=" " * 7, break_on_hyphens=False, break_long_words=False)
    print(line, flush=True)
