"""Check the key of every request: agents have their rollout's, the controller the agents', the trainer the admin key.

agent-lightning has one key, and its controller gives it to the agents. Here its app knows only the admin key; a request
with the agents' key reaches it, under the admin key, where agents or the controller have business, and nowhere else. A
rollout's key (`Keys.of_rollout`) opens the part of this that is about the rollout.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response

from empo2.recipe.gateway.connections import ADMIT
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.request import Next, Request, refusal
from empo2.recipe.protocol import Keys


async def check_key(keys: Keys, metrics: StepMetrics, request: Request, forward: Next) -> Response:
    """Answer 401 to a key that is unknown or another rollout's.

    To an agent's key, answer 403 on a route of the trainer's, and 405 to a call by another method than its own.
    """
    if request.path == "/healthz":
        return await forward(request)
    presented = _presented(request)
    is_operator = not keys.admin or _holds(presented, keys.admin)
    own = keys.of_rollout(request.rollout_id) if request.rollout_id else ""
    is_known = is_operator or _holds(presented, own) or _holds(presented, keys.agent)
    if (request.method, request.kind) == ("GET", "rollouts"):
        metrics.controllers = "ask" if is_known else "refused"
    if not is_known:
        return refusal(401, "Invalid or missing API key")  # as agent-lightning answers
    if admit := request.scope.get("state", {}).get(ADMIT):
        admit()
    if is_operator:
        return await forward(request)
    allowed = "GET" if request.api.partition("/")[0] == "models" else "POST"
    if request.kind == "call" and request.method != allowed:
        problem = f"{request.method} {request.api}: must be {allowed}"
        return JSONResponse({"detail": problem}, 405, {"Allow": allowed})
    if not _is_for_agents(request):
        return refusal(403, f"{request.method} {request.path} needs the admin key (EMPO2_ADMIN_KEY)")
    scope = {**request.scope, "headers": list(request.scope["headers"])}
    MutableHeaders(scope=scope)["authorization"] = f"Bearer {keys.admin}"
    asker = "agent" if _holds(presented, own) else "controller"
    return await forward(replace(request, scope=scope, asker=asker))


def _is_for_agents(request: Request) -> bool:
    """Return True for what an agent or the controller does."""
    match request.method, request.kind:
        case (_, "call") | ("POST", "attempt events") | ("GET", "rollouts") | ("PATCH", "rollout"):
            return True
        case "GET", "events":  # whether a command has reported its reward; other events hold what it was shown
            return request.scope["query_string"] == b"event_type=reward"
    return False


def _presented(request: Request) -> list[str]:
    headers = request.headers
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""), headers.get("api-key", "")]


def _holds(presented: Sequence[str], key: str) -> bool:
    return bool(key) and any(secrets.compare_digest(each.encode(), key.encode()) for each in presented)
