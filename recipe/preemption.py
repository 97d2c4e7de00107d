"""The warning that a training must end soon: SIGTERM, or what Slurm's ``--signal`` sends.

At the first one the trainer finishes its step, saves a checkpoint and ends. Before its first step, and at the second
one, it ends at once.
"""

import signal
from typing import Any

WARNING = signal.SIGUSR1  # by which a launcher passes it on
WARNINGS = (signal.SIGTERM, WARNING)

_expected: tuple[signal.Signals, ...] = ()
_came: str | None = None


def expect(*numbers: signal.Signals) -> None:
    """Raise KeyboardInterrupt at these signals until there is something to save."""
    global _expected
    _expected = numbers
    for number in numbers:
        signal.signal(number, signal.default_int_handler)


def save_first() -> None:
    """Only note the first signal from now on; Ray may have taken SIGTERM meanwhile."""
    for number in _expected:
        signal.signal(number, _note)


def came() -> str | None:
    """Return the name of the signal that came; None if none did."""
    return _came


def _note(number: int, _: Any) -> None:
    global _came
    if _came is not None:
        raise KeyboardInterrupt
    _came = signal.Signals(number).name
