"""Calls of agents that have no rollout, as of any OpenAI-compatible server: ``/v1/...`` (``empo2 serve``).

They all belong to one rollout, which stays open and keeps no events, since nobody trains on them.
"""

from dataclasses import replace

from starlette.responses import Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.request import SERVED, Next, Request

_PATH = "/v1/"


async def direct_calls(request: Request, forward: Next) -> Response:
    """Turn ``/v1/...`` into a call of the one rollout."""
    if not request.path.startswith(_PATH):
        return await forward(request)
    api = request.path.removeprefix(_PATH).removeprefix("v1/")
    await upstream.keep_open(SERVED)
    try:
        address = {"rollout_id": SERVED, "attempt_id": upstream.DEFAULT_ATTEMPT_ID, "mode": "val"}
        return await forward(replace(request, kind="call", api=api, **address))
    finally:
        upstream.forget_events(SERVED)
