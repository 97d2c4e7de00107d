"""Check the key of every request: agents and the controller have one, the trainer and the operator another.

agent-lightning has one key, and its controller gives it to the agents. Here its app knows only the admin key; a request
with the agents' key reaches it, under the admin key, where agents or the controller have business, and nowhere else.
"""

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from empo2.recipe.protocol import Keys

_OF_AGENTS = (
    ("POST", re.compile(r"/proxy/rollout/[^/]+/attempt/[^/]+/mode/(train|val)/openai/v1/.+")),
    ("GET", re.compile(r"/proxy/rollout/[^/]+/attempt/[^/]+/mode/(train|val)/openai/v1/(v1/)?models(/.+)?")),
    ("POST", re.compile(r"/api/rollouts/[^/]+/attempt/[^/]+/events")),
    # The controller's. It hands its key to the agents, so they can ask this, too.
    ("GET", re.compile(r"/api/rollouts")),
    ("PATCH", re.compile(r"/api/rollouts/[^/]+")),
)
# Whether a command has reported its reward itself. Other events of a rollout hold what it was shown.
_REWARD = ("GET", re.compile(r"/api/rollouts/[^/]+/events"), b"event_type=reward")


class KeyCheck:
    """ASGI middleware that answers 401 to an unknown key and 403 to the agents' key on a route of the trainer's."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/healthz" or not self._keys.admin:
            return await self._app(scope, receive, send)
        presented = _presented(Headers(scope=scope))
        if any(_equal(key, self._keys.admin) for key in presented):
            return await self._app(scope, receive, send)
        if not any(_equal(key, self._keys.agent) for key in presented):
            refusal = JSONResponse({"detail": "Invalid or missing API key"}, 401)  # as agent-lightning answers
            return await refusal(scope, receive, send)
        method, path = scope["method"], scope["path"]
        rewards = method == _REWARD[0] and _REWARD[1].fullmatch(path) and scope["query_string"] == _REWARD[2]
        if not (rewards or any(method == verb and route.fullmatch(path) for verb, route in _OF_AGENTS)):
            refusal = JSONResponse({"detail": f"{method} {path} needs the admin key (EMPO2_ADMIN_KEY)"}, 403)
            return await refusal(scope, receive, send)
        scope = {**scope, "headers": list(scope["headers"])}
        MutableHeaders(scope=scope)["authorization"] = f"Bearer {self._keys.admin}"
        await self._app(scope, receive, send)


def _presented(headers: Headers) -> list[str]:
    bearer = headers.get("authorization", "")
    return [bearer.removeprefix("Bearer ") if bearer.startswith("Bearer ") else "", headers.get("x-api-key", "")]


def _equal(presented: str, key: str) -> bool:
    return bool(key) and secrets.compare_digest(presented.encode(), key.encode())
