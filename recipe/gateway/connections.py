"""The gateway's connections: headers come in time, and those without a key leave room for those with one."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 20  # from a connection, or a request's first byte, to the end of its headers
ADMIT = "empo2_admit"  # in a request's ``state``: to be called once its key is known
_SPARED = 256  # descriptors for files, the model servers and the trainer

_HttpProtocol: Any = AutoHTTPProtocol  # that of httptools or of h11


def protocol_with_room(descriptors: int, seconds: float = HEADER_SECONDS) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits for strangers: connections on which no key has been presented yet.

    At most half of the descriptors are strangers'; one more closes the oldest of them. A connection whose headers are
    not complete in time is closed, whoever it is.
    """
    most = max(1, (descriptors - _SPARED) // 2)
    strangers: dict[Any, None] = {}  # the oldest first

    class Protocol(_HttpProtocol):
        _timer: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, app_state: dict[str, Any], **kwargs: Any) -> None:
            admit = {ADMIT: lambda: strangers.pop(self, None)}
            super().__init__(*args, app_state=app_state | admit, **kwargs)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            strangers[self] = None
            if len(strangers) > most:
                oldest = next(iter(strangers))
                del strangers[oldest]
                oldest.transport.close()
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            under_way = self.cycle is not None and not self.cycle.response_complete
            self._stop_waiting() if under_way else self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            strangers.pop(self, None)
            super().connection_lost(exc)

        def _wait_for_headers(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Protocol
