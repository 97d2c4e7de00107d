"""Handle Ctrl-C until a command has its own handler: raise KeyboardInterrupt, and remember that it came.

An extension module may clear the exception while it is imported, as C's ``PyObject_HasAttr`` does; `check` then raises
it again. This module imports nothing heavy, so that the handler is there at once: in the seconds of the imports, Ctrl-C
would else end in a traceback, or be lost.
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
