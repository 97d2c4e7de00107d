"""What an agent is told of an error: in OpenAI's form, or in Anthropic's."""

import contextlib
import json

from starlette.responses import Response

from empo2.recipe.gateway.dialects.dialect import Body

_CHARACTERS = 300  # of an error that is no JSON
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error_of(answer: Response, *, anthropic: bool) -> Body:
    """Return the body of an error, from one in OpenAI's, agent-lightning's or FastAPI's form."""
    content, status = bytes(answer.body), answer.status_code
    problem, error = content.decode(errors="replace")[:_CHARACTERS], None
    with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
        body = json.loads(content)
        error = body.get("error", body.get("detail"))
        problem = error if isinstance(error, str) else str(error["message"])
    if anthropic:
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": problem}}
    if isinstance(error, dict) and "message" in error:
        return {"error": error}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": problem, "type": kind, "param": None, "code": None}}
