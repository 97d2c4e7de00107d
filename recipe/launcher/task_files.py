"""Read tasks from a JSON Lines or Parquet file, or from a data set of the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

from empo2.recipe.errors import ConfigError

HUB = "hub:"
_FILES = (".jsonl", ".parquet")
_EVERY = 10  # of a file without validation tasks, each tenth row is one

Rows = list[dict[str, Any]]


def is_data(source: str) -> bool:
    """Return whether ``tasks.source`` names data, not a function."""
    return source.startswith(HUB) or source.endswith(_FILES)


def read_tasks(
    source: str,
    *,
    validation: str | None = None,
    most_validation_tasks: int = 100,
    config: str | None = None,
    split: str = "train",
) -> tuple[Rows, Rows]:
    """Return training and validation tasks.

    Args:
        source: a file, or ``hub:NAME``.
        validation: another file, or another split on the hub; without it, every tenth row is a validation task.
        most_validation_tasks: at most so many, from the beginning.
        config: configuration of the hub's data set, as ``main`` of gsm8k.
        split: of the hub's data set, for training.

    Raises:
        ConfigError: it cannot be read, or a row is not a JSON object.
        TypeError: an argument that there is not.
    """
    if source.startswith(HUB):
        train = _of_hub(source, config, split)
        val = _of_hub(source, config, validation) if validation else None
    else:
        train = _of_file(source)
        val = _of_file(validation) if validation else None
    if val is None:
        if len(train) < 2:
            raise ConfigError(f"tasks.source={source!r}: has {len(train)} rows; give two or more")
        val = train[::_EVERY][:most_validation_tasks]
        held_out = set(range(0, len(train), _EVERY)[: len(val)])
        train = [row for number, row in enumerate(train) if number not in held_out]
    return train, val[:most_validation_tasks]


def _of_file(name: str) -> Rows:
    file = Path(name).expanduser()
    if file.suffix not in _FILES:
        raise ConfigError(f"tasks.args.validation={name!r}: give a {' or '.join(_FILES)} file")
    try:
        rows = _of_json_lines(file) if file.suffix == ".jsonl" else _of_parquet(file)
    except OSError as error:
        raise ConfigError(f"tasks.source={name!r}: {error.strerror or error}") from None
    for number, row in enumerate(rows):
        try:
            json.dumps(row)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"tasks.source={name!r}: row {number} is not JSON-like: {error}") from None
    return rows


def _of_json_lines(file: Path) -> Rows:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"tasks.source={str(file)!r}: line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"tasks.source={str(file)!r}: line {number} is not an object with the task's fields")
        rows.append(row)
    return rows


def _of_parquet(file: Path) -> Rows:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_table  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    try:
        return read_table(file).to_pylist()
    except ArrowInvalid as error:
        raise ConfigError(f"tasks.source={str(file)!r}: {str(error).splitlines()[0]}") from None


def _of_hub(source: str, config: str | None, split: str) -> Rows:
    from datasets import load_dataset

    try:
        return load_dataset(source.removeprefix(HUB), config, split=split).to_list()  # pyright: ignore
    except Exception as error:  # of many packages: the network, the hub, the data set's files
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"tasks.source={source!r}: cannot be loaded ({type(error).__name__}: {reason}); without a network, give a "
            "file: FILE.jsonl or FILE.parquet"
        ) from None
