"""A table that a player queries and changes by MySQL's statements: in SQLite, as far as it can be, or in a server.

What SQLite does otherwise is emulated: AVG of whole numbers has four decimals, STDDEV is that of the population, `/`
divides exactly, a whole column rounds what is written to it, and text is compared without regard to case.
"""

import ast
import contextlib
import hashlib
import json
import math
import re
import sqlite3
import string
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Protocol

_SECONDS = 5  # of a statement
_CHARACTERS = 2000  # of a result that a player sees
_ROWS = 10_000  # of a result: a join by mistake would fill the memory
_CONCAT_BYTES = 1024  # MySQL's group_concat_max_len, which cuts the fingerprint of a long table

Rows = list[tuple[Any, ...]]


class StatementError(Exception):
    """A statement is refused; the message is the engine's."""


class Table(Protocol):
    """The table of one episode."""

    def execute(self, statement: str) -> Rows:
        """Run one statement; return its rows, none if it changes the table. Raises StatementError."""
        ...

    def rows(self) -> Rows: ...

    def close(self) -> None: ...


def open_table(info: Mapping[str, Any], server: str | None) -> Table:
    """Make the table that a task describes: in memory, or by the option file of MySQL's clients in a server."""
    return ServerTable(info, server) if server else SQLiteTable(info)


def described(info: Mapping[str, Any]) -> str:
    """Return the table's name and its columns with their types, in a line."""
    return f"{info['name']} ({', '.join(f'{column["name"]} {column["type"]}' for column in info['column_info_list'])})"


def shown(table: Table, statement: str) -> str:
    """Run a statement; return what a player sees of its result."""
    try:
        text = str(table.execute(statement))
    except StatementError as error:
        text = f"Error: {error}"
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ... (cut)"


class SQLiteTable:
    """A table in memory. A statement that takes too long, or would reach another file, is refused."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._name, columns = info["name"], info["column_info_list"]
        self._whole = [column["name"] for column in columns if column["type"].upper() == "INT"]
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        for name, arguments, function in _FUNCTIONS:
            self._database.create_function(name, arguments, function, deterministic=True)
        for name, aggregate in _AGGREGATES.items():
            self._database.create_window_function(name, 1, aggregate)  # pyright: ignore[reportArgumentType] (a protocol)
        types = (f"`{column['name']}` {column['type']} COLLATE NOCASE" for column in columns)
        self._database.execute(f"CREATE TABLE `{self._name}` ({', '.join(types)})")
        values = [[str(value) for value in row] for row in info["row_list"]]
        self._database.executemany(f"INSERT INTO `{self._name}` VALUES ({', '.join('?' * len(columns))})", values)
        self._database.set_authorizer(lambda action, *_: int(action in _FORBIDDEN))

    def execute(self, statement: str) -> Rows:
        deadline = time.monotonic() + _SECONDS
        self._database.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
        try:
            cursor = self._database.execute(_for_sqlite(statement.strip().rstrip(";")))
            found, changes = cursor.fetchmany(_ROWS), cursor.description is None
            cursor.close()  # an open one locks the table
            for column in self._whole if changes else ():
                with contextlib.suppress(sqlite3.OperationalError):  # the column, or the table, has another name now
                    self._database.execute(
                        f"UPDATE `{self._name}` SET `{column}` = CAST(ROUND(`{column}`) AS INT) "
                        f"WHERE typeof(`{column}`) = 'real'"
                    )
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: a null character
            raise StatementError(str(error)) from None
        return found

    def rows(self) -> Rows:
        return self.execute(f"SELECT * FROM `{self._name}`")

    def close(self) -> None:
        self._database.close()


class ServerTable:
    """A table in a database of its own of a MySQL or MariaDB server, dropped at the end.

    Args:
        options: an option file of MySQL's clients, whose user may create databases; best one who may do no more.
    """

    def __init__(self, info: Mapping[str, Any], options: str) -> None:
        try:
            import pymysql  # pyright: ignore[reportMissingModuleSource]
        except ImportError:
            raise ModuleNotFoundError("a server needs the package pymysql: `pip install pymysql`") from None
        self._name, columns, self._error = info["name"], info["column_info_list"], pymysql.Error
        self._database = f"lifelong_{uuid.uuid4().hex}"
        try:
            # The server ends statements first: one that goes on alone would hold its locks.
            self._connection = pymysql.connect(read_default_file=options, autocommit=True, read_timeout=2 * _SECONDS)
        except pymysql.Error as error:
            raise ConnectionError(f"{options}: {error}") from None
        with self._connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {self._database}")
            self._set_up()
            types = (f"`{column['name']}` {column['type']}" for column in columns)
            cursor.execute(f"CREATE TABLE `{self._name}` ({', '.join(types)})")
            cursor.executemany(
                f"INSERT INTO `{self._name}` VALUES ({', '.join(['%s'] * len(columns))})", info["row_list"]
            )

    def execute(self, statement: str) -> Rows:
        try:
            if not self._connection.open:  # a statement that took too long has closed it
                self._connection.connect()
                self._set_up()
            with self._connection.cursor() as cursor:
                cursor.execute(statement)
                found = cursor.fetchall()
        except self._error as error:
            raise StatementError(str(error)) from None
        return [tuple(float(value) if isinstance(value, Decimal) else value for value in row) for row in found]

    def rows(self) -> Rows:
        return self.execute(f"SELECT * FROM `{self._name}`")

    def close(self) -> None:
        with contextlib.suppress(self._error):  # the episode's result is there already
            self._connection.ping(reconnect=True)
            with self._connection.cursor() as cursor:
                cursor.execute(f"DROP DATABASE IF EXISTS {self._database}")
            self._connection.close()

    def _set_up(self) -> None:
        self._connection.select_db(self._database)
        # MySQL's and MariaDB's names of a statement's limit.
        limits = (f"max_execution_time = {1000 * _SECONDS}", f"max_statement_time = {_SECONDS}")
        with self._connection.cursor() as cursor:
            for setting in (f"sql_select_limit = {_ROWS}", *limits):
                with contextlib.suppress(self._error):
                    cursor.execute(f"SET SESSION {setting}")


# Verdicts


def fingerprints(rows: Rows) -> tuple[str, str]:
    """Return LifelongAgentBench's md5 of a table's rows in any order: cut as MySQL cuts it, and whole."""
    joined = (",".join(str(value) for value in row if value is not None) for row in rows)
    parts = ",".join(sorted(hashlib.md5(text.encode()).hexdigest()[:5] for text in joined))
    whole = hashlib.md5(parts.encode()).hexdigest()
    return hashlib.md5(parts.encode()[:_CONCAT_BYTES]).hexdigest(), whole


def equal_rows(found: Sequence[Sequence[Any]], right: Sequence[Sequence[Any]], *, ordered: bool) -> bool:
    """Compare rows: numbers to a millionth, also those that are written as text; all else as text."""
    if not ordered:
        found, right = sorted(found, key=_order), sorted(right, key=_order)
    return len(found) == len(right) and all(
        len(row) == len(other) and all(map(_equal, row, other)) for row, other in zip(found, right, strict=True)
    )


def parse_answer(text: str) -> list[list[Any]] | None:
    """Return the rows of an answer in JSON or as Python writes a list of tuples; None if it is neither.

    What follows is ignored. A single row or value is a table, too.
    """
    text = text.strip("*`" + string.whitespace)
    line = text.partition("\n")[0]
    for read, part in (
        (json.loads, text),
        (ast.literal_eval, text),
        (lambda part: json.JSONDecoder().raw_decode(part)[0], text),
        (ast.literal_eval, line[: line.rfind("]") + 1]),
    ):
        try:
            rows = read(part)
            break
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    else:
        return None
    rows = list(rows) if isinstance(rows, list | tuple) else [rows]
    if rows and not any(isinstance(row, list | tuple) for row in rows):
        return [rows]
    return [list(row) if isinstance(row, list | tuple) else [row] for row in rows]


def _equal(one: Any, other: Any) -> bool:
    numbers = _number(one), _number(other)
    if None not in numbers:
        return math.isclose(*numbers, rel_tol=1e-6, abs_tol=1e-6)  # pyright: ignore[reportArgumentType]
    return _text(one) == _text(other)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None  # Nan and Infinity are names, too


def _text(value: Any) -> str:
    return "None" if value is None or value in ("NULL", "null") else str(value).strip()


def _order(row: Sequence[Any]) -> list[str]:
    return [f"{number:.5g}" if (number := _number(value)) is not None else _text(value) for value in row]


# What SQLite lacks or does otherwise

_UNLIKE = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`|/\*.*?\*/)|\b(left|right)\s*\(|/""", re.DOTALL | re.IGNORECASE)
# MySQL's letters of DATE_FORMAT that are others in Python.
_DATE_LETTERS = {"%i": "%M", "%s": "%S", "%M": "%B", "%W": "%A", "%T": "%H:%M:%S", "%h": "%I"}
_FORBIDDEN = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}
_FUNCTIONS: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("concat", -1, lambda *parts: None if None in parts else "".join(map(str, parts))),
    ("if", 3, lambda condition, yes, no: yes if condition else no),
    ("concat_ws", -1, lambda between, *parts: str(between).join(str(part) for part in parts if part is not None)),
    ("char_length", 1, lambda text: None if text is None else len(str(text))),
    ("leftmost", 2, lambda text, size: None if text is None else str(text)[: max(size, 0)]),
    ("rightmost", 2, lambda text, size: None if text is None else str(text)[-size:] if size > 0 else ""),
    ("regexp", 2, lambda pattern, text: None if text is None else bool(re.search(pattern, str(text), re.IGNORECASE))),
    ("now", 0, lambda: f"{datetime.now():%Y-%m-%d %H:%M:%S}"),
    ("curdate", 0, lambda: f"{datetime.now():%Y-%m-%d}"),
    ("datediff", 2, lambda one, other: (_date(one).date() - _date(other).date()).days if one and other else None),
    ("date_format", 2, lambda date, form: _date(date).strftime(_pythons(form)) if date else None),
    ("year", 1, lambda date: int(date[:4]) if date else None),
    ("month", 1, lambda date: int(date[5:7]) if date else None),
    ("day", 1, lambda date: int(date[8:10]) if date else None),
    ("greatest", -1, lambda *values: None if None in values else max(values)),
    ("least", -1, lambda *values: None if None in values else min(values)),
)


def _for_sqlite(statement: str) -> str:
    """Let `/` divide whole numbers exactly, and LEFT and RIGHT be functions; quoted text and comments stay."""
    return _UNLIKE.sub(lambda match: match[1] or (f"{match[2]}most(" if match[2] else " * 1.0 /"), statement)


def _date(text: str) -> datetime:
    """Return a time, or the beginning of a day; a player sees SQLite's "user-defined function raised exception"."""
    return datetime.fromisoformat(text) if ":" in text else datetime.fromisoformat(text[:10])


def _pythons(form: str) -> str:
    return re.sub("%.", lambda found: _DATE_LETTERS.get(found[0], found[0]), form)


class _Average:
    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: Any) -> None:
        if value is not None:
            self.values.append(value if isinstance(value, int) else _leading_number(value))

    def inverse(self, value: Any) -> None:  # of the row that leaves a window, which is the oldest one
        if value is not None:
            del self.values[0]

    def value(self) -> float | None:
        return self.finalize()

    def finalize(self) -> float | None:
        if not self.values:
            return None
        if all(isinstance(value, int) for value in self.values):
            mean = Decimal(sum(self.values)) / len(self.values)
            return float(mean.quantize(Decimal("0.0001"), ROUND_HALF_UP))
        return math.fsum(self.values) / len(self.values)


class _Variance(_Average):
    def finalize(self) -> float | None:
        if not self.values:
            return None
        mean = math.fsum(self.values) / len(self.values)
        return math.fsum((value - mean) ** 2 for value in self.values) / len(self.values)


class _Deviation(_Variance):
    def finalize(self) -> float | None:
        variance = super().finalize()
        return None if variance is None else math.sqrt(variance)


_AGGREGATES = {
    "avg": _Average,
    **dict.fromkeys(("stddev", "std", "stddev_pop"), _Deviation),
    **dict.fromkeys(("variance", "var_pop"), _Variance),
}


def _leading_number(value: Any) -> float:
    """Return the number at the beginning of a text, 0 without one, as MySQL does."""
    match = re.match(r"\s*[-+]?(\d+\.?\d*|\.\d+)", str(value))
    return float(match[0]) if match else 0.0
