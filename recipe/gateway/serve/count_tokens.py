"""Anthropic's ``/v1/messages/count_tokens``: how long the policy's prompt would be, without tips."""

import httpx
from starlette.responses import JSONResponse, Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.dialects.anthropic_messages import AnthropicCall
from empo2.recipe.gateway.request import Next, Request, refusal
from empo2.recipe.gateway.stages.form import check_call
from empo2.recipe.gateway.tokens.rendering import rendered


class TokenCounter:
    """Ask the policy's server to render the chat, and leave no trace of it."""

    def __init__(self, servers: upstream.ModelServers) -> None:
        self._servers = servers

    async def __call__(self, request: Request, forward: Next) -> Response:
        if not (request.is_call and request.api == "messages/count_tokens"):
            return await forward(request)
        if not upstream.exists(request.rollout_id):
            return _refused(404, f"Rollout not found: {request.rollout_id}")
        try:
            call = AnthropicCall(request.body, {})  # a thread is not known here
            check_call(call.body, chat=True)
        except ValueError as error:
            return _refused(400, str(error))
        except (LookupError, TypeError, AttributeError):  # lists in the place of objects, and the like
            return _refused(400, "the request is not one of /messages/count_tokens; see its reference")
        try:
            ids = await rendered(self._servers, request.rollout_id, call.body)
        except upstream.NoServersError as error:
            return _refused(503, str(error))
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 400:
                return AnthropicCall.refusal(400, error.response.content)
            return _refused(502, f"the model server answers {error.response.status_code} to /tokenize")
        except httpx.HTTPError as error:
            return _refused(502, f"the model server does not answer: {type(error).__name__}")
        return JSONResponse({"input_tokens": len(ids)})


def _refused(status: int, problem: str) -> Response:
    return AnthropicCall.refusal(status, bytes(refusal(status, problem, call=True).body))
