"""Tell an agent each error in the form of the API that it asked."""

import httpx
from starlette.responses import Response, StreamingResponse

from empo2.recipe.gateway.dialects.errors import told
from empo2.recipe.gateway.request import Next, Request, refusal
from empo2.recipe.gateway.upstream import NoServersError


class ErrorForms:
    """Stand before all that may refuse a call; errors of ``gateway.other_server`` stay as they are."""

    async def __call__(self, request: Request, forward: Next) -> Response:
        answer = await forward(request)
        if request.kind != "call" or answer.status_code < 400 or isinstance(answer, StreamingResponse):
            return answer
        return told(answer, anthropic=speaks_anthropic(request))


def unanswered(error: NoServersError | httpx.HTTPError) -> Response:
    """Return what an agent is told where the policy's servers do not answer a call that leaves no trace."""
    if isinstance(error, NoServersError):
        return refusal(503, str(error), call=True)
    return refusal(502, f"the model server does not answer: {type(error).__name__}", call=True)


def speaks_anthropic(request: Request) -> bool:
    """Return True for a call of an API of Anthropic's, or of ``models`` by a client of Anthropic's."""
    return request.api.partition("/")[0] == "messages" or "anthropic-version" in request.headers
