"""Wait for a server that is starting."""

import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

from empo2.recipe.errors import Empo2Error, ProcessError

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


def gateway_http(url: str, **options: Any) -> httpx.Client:
    """Return a client of the gateway at ``url``, with options of `httpx.Client`, that asks no proxy.

    Raises:
        Empo2Error: ``url`` is no address.
    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:  # such as of a port that is no number
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host:
        raise Empo2Error(f"--gateway {url}: not an address of `empo2 gateway`, such as http://10.0.0.5:8080")
    return httpx.Client(base_url=address, trust_env=False, **options)


def gateway_answer(url: str, get: Callable[[], httpx.Response]) -> httpx.Response:
    """Return what the gateway at ``url`` answers; one that is not there yet is waited for, and this is said once.

    Raises:
        ProcessError: as `first_answer`.
    """
    try:
        return get()
    except httpx.TransportError as error:
        print(f"waiting for a gateway at {url} ({error})", file=sys.stderr, flush=True)
    return first_answer(get, lambda _: None)
