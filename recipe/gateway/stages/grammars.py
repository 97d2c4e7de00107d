"""Refuse grammars that would end the model server."""

import asyncio
from importlib.util import find_spec
from typing import Any

from starlette.responses import Response

from empo2.recipe.gateway.request import Next, Request, refusal


class Grammars:
    """Answer 400 to a regular expression or an EBNF grammar that xgrammar does not take.

    vLLM 0.20 then turns to another library for the check, but not for the request, if an earlier one has used xgrammar:
    its engine ends, and all calls with it (vllm issue 43920; mended in its pull request 47312).
    """

    async def __call__(self, request: Request, forward: Next) -> Response:
        given = request.body.get("structured_outputs") if request.is_call else None
        if not (isinstance(given, dict) and (given.get("regex") or given.get("grammar"))):
            return await forward(request)
        # In a thread: importing xgrammar takes seconds.
        problem = await asyncio.to_thread(_problem, given)
        return refusal(400, problem, call=True) if problem else await forward(request)


def _problem(given: dict[str, Any]) -> str:
    if find_spec("xgrammar") is None:  # where the model server is another machine's
        return ""
    from xgrammar import Grammar

    # Grammars in Lark's form, which have no such sign, are translated by vLLM.
    checks = [("regex", Grammar.from_regex, ""), ("grammar", Grammar.from_ebnf, "::=")]
    for name, parsed, sign in checks:
        text = given.get(name)
        if isinstance(text, str) and sign in text:
            try:
                parsed(text)
            except Exception as error:
                why = str(error).strip().splitlines()[0].rpartition(": ")[2][:200]
                return f"structured_outputs.{name}: xgrammar does not take it: {why}"
    return ""
