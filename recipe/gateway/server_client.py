"""The connections to model servers: aiohttp for the many completions, httpx for ``gateway.other_server``."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import cycle
from typing import Any, Self

import aiohttp
import httpx
import orjson

from empo2.recipe.json_text import dumped

CALL_SECONDS = 300  # as agent-lightning's own client
_POOLS = 32
_IDLE_SECONDS = 2  # a server closes idle connections, uvicorn after 5: a request on one that it is closing would fail
_ERROR_CHARACTERS = 1000
_AT_ONCE = 2**20  # bytes; aiohttp warns of more, which would hold up the event loop, and sends a file in parts

# Fields of the gateway's requests that are vLLM's own; OpenAI's servers refuse a request that has one.
NOT_OPENAI = ("return_token_ids", "top_k", "min_p", "repetition_penalty")


@dataclass
class ServerAnswer:
    """What the gateway needs of `httpx.Response`, whose own way copies the content and takes as long as the rest."""

    url: str
    status_code: int
    headers: dict[str, str]
    content: bytes
    extensions: dict[str, Any] = field(default_factory=dict)

    def json(self) -> Any:
        return orjson.loads(self.content)

    def raise_for_status(self) -> Self:
        if self.status_code >= 400:
            request = httpx.Request("POST", self.url)
            httpx.Response(self.status_code, content=self.content, request=request).raise_for_status()
        return self

    async def aclose(self) -> None:
        """It has been read."""


class ServerClient:
    """What the gateway needs of `httpx.AsyncClient`, at a fifth of its CPU: JSON is posted, and the answer read whole.

    It knows no streams, and no limit on connections lets agents and reflections wait for each other's.

    Args:
        headers: of all requests.
        carried: returns further headers of the request that is sent.
        left_out: fields that are taken out of a body.
    """

    _session: aiohttp.ClientSession

    def __init__(
        self, headers: Mapping[str, str], carried: Callable[[], Mapping[str, str]], left_out: Collection[str] = ()
    ) -> None:
        self._headers = {"content-type": "application/json", **headers}
        self._carried, self._left_out = carried, left_out

    async def __aenter__(self) -> Self:
        context = httpx.create_ssl_context()
        connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=context)
        self._session = aiohttp.ClientSession(connector=connections, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(
        self, url: str, *, json: Any, headers: dict[str, str] | None = None, timeout: float = CALL_SECONDS
    ) -> ServerAnswer:
        """Send JSON and return the answer, as httpx does; an error that is no JSON becomes one with its text.

        Raises:
            httpx.TransportError: no answer within ``timeout`` seconds.
        """
        limit = aiohttp.ClientTimeout(timeout)
        body = dumped({name: value for name, value in json.items() if name not in self._left_out})
        data = body if len(body) < _AT_ONCE else BytesIO(body)
        try:
            async with self._session.post(
                url, data=data, headers={**(headers or {}), **self._carried()}, timeout=limit, allow_redirects=False
            ) as answer:
                content, kind = await answer.read(), answer.headers.get("content-type", "")
        except TimeoutError:  # aiohttp's own are of this type, too
            raise httpx.ReadTimeout(f"no answer within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(str(error)) from error
        if answer.status >= 400 and not kind.startswith("application/json"):
            text = content.decode(errors="replace").strip()[:_ERROR_CHARACTERS]
            message = text or f"the model server answers {answer.status}"
            said = {"message": message, "type": "server_error", "code": answer.status}
            kind, content = "application/json", dumped({"error": said})
        return ServerAnswer(url, answer.status, {"content-type": kind}, content)


class Network(httpx.AsyncBaseTransport):
    """Many small pools of connections in the place of one, without a limit on any.

    A limit would let agents and reflections wait for each other's connections. One pool would look at all of its
    connections for each request (httpcore 1.0, ``AsyncConnectionPool._assign_requests_to_connections``): with 128 calls
    under way a request takes 8 ms of a core, spread over 32 pools 1.3 (docs/performance.md).
    """

    def __init__(self) -> None:
        context = httpx.create_ssl_context()
        unlimited = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS)
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=unlimited) for _ in range(_POOLS)]
        self._turns = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()
