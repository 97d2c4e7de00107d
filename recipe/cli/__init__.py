"""The command line: one module per family of commands.

This module is light, so that Ctrl-C is handled while the rest is imported, which takes seconds.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable

from empo2.recipe import interruption
from empo2.recipe.printed import printable


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit code: 0 done, 1 failed, 2 wrong settings, 130 interrupted."""
    if interruption.handle():
        sys.excepthook, sys.unraisablehook = (
            _unless_interrupted(sys.excepthook),
            _unless_interrupted(sys.unraisablehook),
        )
    code, message = 130, ""
    try:
        from .verbs import run

        code, message = run(arguments)
    except KeyboardInterrupt:
        pass
    except BaseException:
        if not interruption.came():
            raise
    if interruption.came() or code == 130:  # a library may have turned the interruption into an error of its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code, message = 130, "empo2: interrupted; everything that was started has been stopped"
    if message:
        print(printable(message), file=sys.stderr, flush=True)
    if interruption.came():
        # Python would end by SIGINT, though it was handled, if it met the interruption in exec (as of dataclasses).
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)
    return code


def _unless_interrupted(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook made silent for an interruption: extension modules and callbacks print it where it meets them."""
    return lambda *arguments: None if interruption.came() else hook(*arguments)
