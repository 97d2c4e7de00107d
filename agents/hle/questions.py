"""Questions of HLE, the replies' answers, and how the official data set becomes a panel."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ..text_game.episode import ChatEpisode, one_of

CHOICE, EXACT = "multipleChoice", "exactMatch"
SETTINGS = Path(__file__).with_name("hle.yaml")
HUB = "hub:"
_SPLIT = "test"  # the only one
_READABLE = (".jsonl", ".parquet")
_MARKUP = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_NAMED = re.compile(r"^\W*(?:option|choice)\s+", re.IGNORECASE)
_ANSWER = re.compile(r"answer\W*?:[*\s]*(.+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Episode(ChatEpisode):
    """A question of HLE. Raises ValueError when a field is wrong."""

    variables = "HLE"

    id: str
    question: str
    answer: str
    answer_type: str  # CHOICE | EXACT
    category: str
    canary: str  # the data set's mark, by which trainings refuse its rows

    def __post_init__(self) -> None:
        one_of((CHOICE, EXACT), "answer_type", self.answer_type)


def answer_of(reply: str) -> str:
    """Return what follows the last "Answer:", or the last line of a reply without one."""
    lines = _ANSWER.findall(reply) or [line for line in reply.splitlines() if line.strip()]
    return lines[-1].strip(" *`$\t") if lines else ""


def is_choice(reply: str, right: str) -> bool:
    """Return whether a reply's answer begins with the letter of the right choice; a last line must be it alone."""
    text = answer_of(reply)
    while (plain := _MARKUP.sub(r"\1", text)) != text:  # one in another
        text = plain
    text = _NAMED.sub("", text)
    letter = re.match(r"\W*([A-Z])\b" if _ANSWER.search(reply) else r"\W*([A-Z])\W*\Z", text)
    letter = letter or re.fullmatch(r"\W*([a-z])\W*", text)
    return letter is not None and letter[1].upper() == right.strip()


def is_same(reply: str, right: str) -> bool:
    """Return whether a reply's answer is the right one as text, regardless of case, spaces and a full stop."""
    return _plain(answer_of(reply)) == _plain(right)


def _plain(text: str) -> str:
    return "".join(text.casefold().split()).strip("$").rstrip(".").strip("$")


def panel_of(source: str) -> tuple[dict[str, Any], int]:
    """Return a panel of a data set's text questions, and how many others it has.

    Args:
        source: a file, .jsonl or .parquet, with the fields of HLE; or hub:NAME, for who has accepted its terms there.

    Raises ValueError if it cannot be read, or has other fields.
    """
    rows, others = [], 0
    try:
        for row in _read(source):
            if row.get("image"):
                others += 1
            else:
                rows.append(asdict(Episode(**{field.name: row[field.name] for field in fields(Episode)})))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source} has not the fields of HLE ({error!r})") from None
    if not rows:
        raise ValueError(f"{source} has no text question")
    canary = rows[0]["canary"]
    panel = {
        "description": "HLE's text questions.",
        "group": ["category"],
        "config": yaml.safe_load(SETTINGS.read_text()),
    }
    different = [{name: value for name, value in row.items() if name != "canary" or value != canary} for row in rows]
    return {**panel, "common": {"canary": canary}, "rows": different}, others


def _read(source: str) -> Iterator[Mapping[str, Any]]:
    if source.startswith(HUB):
        from datasets import load_dataset

        name = source.removeprefix(HUB)
        try:
            yield from load_dataset(name, split=_SPLIT)  # pyright: ignore[reportReturnType]
        except Exception as error:  # of many packages: the network, the hub, its terms
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ValueError(
                f"{source} cannot be loaded ({reason}); accept its terms there, and set HF_TOKEN"
            ) from None
    elif source.endswith(_READABLE[0]):
        for number, line in enumerate(Path(source).read_text().split("\n"), start=1):
            try:
                yield from [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"{source}: line {number} is not JSON: {error}") from None
    elif source.endswith(_READABLE[1]):
        from pyarrow.parquet import read_table  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

        yield from read_table(source).to_pylist()
    else:
        raise ValueError(f"{source} is neither {' nor '.join(_READABLE)} nor {HUB}NAME")
