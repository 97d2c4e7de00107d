"""A table that a player queries and changes by MySQL's statements: in SQLite, as far as it can be, or in a server.

What SQLite does otherwise is emulated: AVG of whole numbers has four decimals, STDDEV is that of the population, `/`
divides exactly, a whole column rounds what is written to it, and text is compared without regard to case.
"""

import ast
import hashlib
import json
import math
import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Protocol

_SECONDS = 5  # of a statement
_CHARACTERS = 2000  # of a result that a player sees
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
        self._database.create_aggregate("avg", 1, _Average)  # pyright: ignore[reportArgumentType] (a protocol)
        for name in ("stddev", "std", "stddev_pop"):
            self._database.create_aggregate(name, 1, _Deviation)  # pyright: ignore[reportArgumentType]
        types = (f"`{column['name']}` {column['type']} COLLATE NOCASE" for column in columns)
        self._database.execute(f"CREATE TABLE `{self._name}` ({', '.join(types)})")
        values = [[str(value) for value in row] for row in info["row_list"]]
        self._database.executemany(f"INSERT INTO `{self._name}` VALUES ({', '.join('?' * len(columns))})", values)
        self._database.set_authorizer(lambda action, *_: int(action in _FORBIDDEN))

    def execute(self, statement: str) -> Rows:
        deadline = time.monotonic() + _SECONDS
        self._database.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
        try:
            cursor = self._database.execute(_exact_division(statement.strip().rstrip(";")))
            found = cursor.fetchall()
            if cursor.description is None:
                for column in self._whole:
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
            self._connection = pymysql.connect(read_default_file=options, autocommit=True, read_timeout=_SECONDS)
        except pymysql.Error as error:
            raise ConnectionError(f"{options}: {error}") from None
        with self._connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {self._database}")
            cursor.execute(f"USE {self._database}")
            types = (f"`{column['name']}` {column['type']}" for column in columns)
            cursor.execute(f"CREATE TABLE `{self._name}` ({', '.join(types)})")
            cursor.executemany(
                f"INSERT INTO `{self._name}` VALUES ({', '.join(['%s'] * len(columns))})", info["row_list"]
            )

    def execute(self, statement: str) -> Rows:
        try:
            if not self._connection.open:  # a statement that took too long has closed it
                self._connection.connect()
                self._connection.select_db(self._database)
            with self._connection.cursor() as cursor:
                cursor.execute(statement)
                found = cursor.fetchall()
        except self._error as error:
            raise StatementError(str(error)) from None
        return [tuple(float(value) if isinstance(value, Decimal) else value for value in row) for row in found]

    def rows(self) -> Rows:
        return self.execute(f"SELECT * FROM `{self._name}`")

    def close(self) -> None:
        self._connection.ping(reconnect=True)
        with self._connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {self._database}")
        self._connection.close()


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

    A single row or value is a table, too.
    """
    text = text.strip().strip("`").strip()
    for read in (json.loads, ast.literal_eval):
        try:
            rows = read(text)
            break
        except (ValueError, SyntaxError, MemoryError, RecursionError):
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
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None  # Nan and Infinity are names, too


def _text(value: Any) -> str:
    return "None" if value is None or value in ("NULL", "null") else str(value).strip()


def _order(row: Sequence[Any]) -> list[str]:
    return [f"{number:.5g}" if (number := _number(value)) is not None else _text(value) for value in row]


# What SQLite lacks or does otherwise

_QUOTED_OR_DIVISION = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`|/\*.*?\*/)|/""", re.DOTALL)
_FORBIDDEN = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}
_FUNCTIONS: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("concat", -1, lambda *parts: None if None in parts else "".join(map(str, parts))),
    ("if", 3, lambda condition, yes, no: yes if condition else no),
    ("year", 1, lambda date: int(date[:4]) if date else None),
    ("month", 1, lambda date: int(date[5:7]) if date else None),
    ("day", 1, lambda date: int(date[8:10]) if date else None),
    ("greatest", -1, lambda *values: None if None in values else max(values)),
    ("least", -1, lambda *values: None if None in values else min(values)),
)


def _exact_division(statement: str) -> str:
    """Let `/` divide whole numbers exactly; quoted text and comments stay."""
    return _QUOTED_OR_DIVISION.sub(lambda match: match[1] or " * 1.0 /", statement)


class _Average:
    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: Any) -> None:
        if value is not None:
            self.values.append(value if isinstance(value, int) else _leading_number(value))

    def finalize(self) -> float | None:
        if not self.values:
            return None
        if all(isinstance(value, int) for value in self.values):
            mean = Decimal(sum(self.values)) / len(self.values)
            return float(mean.quantize(Decimal("0.0001"), ROUND_HALF_UP))
        return math.fsum(self.values) / len(self.values)


class _Deviation(_Average):
    def finalize(self) -> float | None:
        if not self.values:
            return None
        mean = math.fsum(self.values) / len(self.values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / len(self.values))


def _leading_number(value: Any) -> float:
    """Return the number at the beginning of a text, 0 without one, as MySQL does."""
    match = re.match(r"\s*[-+]?(\d+\.?\d*|\.\d+)", str(value))
    return float(match[0]) if match else 0.0
