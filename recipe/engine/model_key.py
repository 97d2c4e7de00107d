"""vLLM 0.20.2 that answers only who has the run's key, on every route: its own ``--api-key`` guards those below /v1.

Named by vLLM's ``--middleware``, which is imported in the process of its API server, and in no other.
"""

import os
import secrets
import sys

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from empo2.recipe.protocol import MODEL_KEY


class KeyCheck:
    """ASGI middleware that answers 401 without the key, and 403 to web sockets, which nobody here uses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._expected = f"Bearer {key}" if (key := _key()) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._expected is None or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
        elif secrets.compare_digest(Headers(scope=scope).get("authorization", "").encode(), self._expected.encode()):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "Invalid or missing API key"}, 401)(scope, receive, send)


def give_key(key: str) -> None:
    """Give the key to the vLLM servers of this Ray job. A runtime environment would show it on a command line."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(f"{MODEL_KEY} {ray.get_runtime_context().worker.current_job_id.hex()}", key)


def _key() -> str:
    """Return the key of this server: from its environment, or from the Ray job whose actor it is; empty for none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return os.environ.get(MODEL_KEY, "")
    from ray.experimental.internal_kv import _internal_kv_get

    key = _internal_kv_get(f"{MODEL_KEY} {ray.get_runtime_context().worker.current_job_id.hex()}")
    if key is None:
        raise RuntimeError("the trainer has given this job's vLLM servers no key")
    return key.decode()
