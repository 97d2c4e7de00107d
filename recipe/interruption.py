"""Handle Ctrl-C while a command is imported and until it has a handler of its own.

`KeyboardInterrupt` is raised, and the interruption is also remembered, since code that is imported may clear any error,
as C's ``PyObject_HasAttr`` does. This module imports nothing heavy.
"""

import signal
from typing import Any

_came = False


def handle() -> bool:
    """Handle Ctrl-C from now on, if nothing else does and it is not ignored (background jobs); return whether so."""
    free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if free:
        signal.signal(signal.SIGINT, _interrupt)
    return free


def came() -> bool:
    """Return whether Ctrl-C came."""
    return _came


def check() -> None:
    """Raise if Ctrl-C came; to be called where another handler takes over.

    Raises:
        KeyboardInterrupt: it came, and whatever met it went on.
    """
    if _came:
        raise KeyboardInterrupt


def _interrupt(*_: Any) -> None:
    global _came
    _came = True
    raise KeyboardInterrupt
