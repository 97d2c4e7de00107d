"""Wait for a server that is starting."""

import time
from collections.abc import Callable

import httpx

from empo2.recipe.errors import ProcessError

_MINUTES = 30  # a 7B model from a cold disk takes minutes, and a busy machine several times as long
_POLL_SECONDS = 0.2


def first_answer(get: Callable[[], httpx.Response], alive: Callable[[httpx.TransportError], object]) -> httpx.Response:
    """Return what a server answers, as soon as it does: half an hour after the start at most.

    Args:
        get: asks it.
        alive: takes the error of a request without an answer, and raises if the server has ended.

    Raises:
        ProcessError: there is no answer in time.
    """
    deadline = time.monotonic() + 60 * _MINUTES
    while True:
        try:
            return get()
        except httpx.TransportError as error:
            alive(error)
            if time.monotonic() > deadline:
                raise ProcessError(f"{error.request.url} does not answer after {_MINUTES} minutes") from None
        time.sleep(_POLL_SECONDS)
