"""Tell an agent each error in the form of the API that it asked."""

from starlette.responses import Response, StreamingResponse

from empo2.recipe.gateway.dialects.errors import told
from empo2.recipe.gateway.request import Next, Request


class ErrorForms:
    """Stand before all that may refuse a call; errors of ``gateway.other_server`` stay as they are."""

    async def __call__(self, request: Request, forward: Next) -> Response:
        answer = await forward(request)
        if request.kind != "call" or answer.status_code < 400 or isinstance(answer, StreamingResponse):
            return answer
        return told(answer, anthropic=speaks_anthropic(request))


def speaks_anthropic(request: Request) -> bool:
    """Return True for a call of an API of Anthropic's, or of ``models`` by a client of Anthropic's."""
    return request.api.partition("/")[0] == "messages" or "anthropic-version" in request.headers
