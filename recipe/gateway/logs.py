"""The gateway's log: one line for each error, never a traceback's locals, never the text of a request."""

import logging
import sqlite3
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

import httpx
import structlog

from empo2.memory import EmbedderError, MemoryFileError

# Their messages are of our own, of SQLite, of the system or of the transport. Those of others may quote a request.
_SAFE = (EmbedderError, MemoryFileError, sqlite3.Error, OSError, httpx.HTTPError)
_CHARACTERS = 300


def described(error: BaseException) -> str:
    """Return an exception's type, and its message where that cannot quote a request, in one line."""
    name = type(error).__name__
    message = " ".join(str(error).split())[:_CHARACTERS] if isinstance(error, _SAFE) else ""
    return f"{name}: {message}" if message else name


def configure_logs() -> None:
    """Write structlog's and the standard library's warnings and errors one line each."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            _describe_exception,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Droppable(sys.stdout))),
    )
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s [%(levelname)s] %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class _Droppable:
    """A stream that drops what it cannot write: on a full disk a line of the log must not fail what it is about."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _describe_exception(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    given = event.pop("exc_info", None)
    error = given[1] if isinstance(given, tuple) else given
    if given is True:
        error = sys.exc_info()[1]
    if isinstance(error, BaseException):
        event["error"] = described(error)
    return event


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        plain = logging.makeLogRecord(record.__dict__ | {"exc_info": None, "exc_text": None, "stack_info": None})
        text = " ".join(super().format(plain).split())
        return f"{text} ({described(error)})" if error else text
