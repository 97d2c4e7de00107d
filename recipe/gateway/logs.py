"""The gateway's log: one line for each error, never a traceback's locals, never the text of a request."""

import logging
import sqlite3
import sys
from collections.abc import MutableMapping
from typing import Any

import httpx
import structlog

from empo2.memory import EmbedderError, MemoryFileError
from empo2.recipe.printed import one_line

# Their messages are of our own, of SQLite, of the system or of the transport. Those of others may quote a request.
_SAFE = (EmbedderError, MemoryFileError, sqlite3.Error, OSError, httpx.HTTPError)


def described(error: BaseException) -> str:
    """Return an exception's type, and its message where that cannot quote a request, in one line."""
    name = type(error).__name__
    message = one_line(str(error)) if isinstance(error, _SAFE) else ""
    return f"{name}: {message}" if message else name


def configure_logs() -> None:
    """Write structlog's and the standard library's warnings and errors one line each."""
    shared: list[Any] = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso"), _in_one_line]
    formatter = structlog.stdlib.ProcessorFormatter
    structlog.configure(
        processors=[*shared, formatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        formatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[formatter.remove_processors_meta, structlog.dev.ConsoleRenderer(colors=False)],
        )
    )
    logging.raiseExceptions = False  # on a full disk a line of the log must not fail what it is about
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def _in_one_line(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    given = event.pop("exc_info", None)
    error = sys.exc_info()[1] if given is True else given[1] if isinstance(given, tuple) else given
    if isinstance(error, BaseException):
        event["error"] = described(error)
    return {**event, "event": " ".join(str(event["event"]).split())}
