"""Refuse grammars that would end the model server."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Literal

from starlette.responses import Response

from empo2.recipe.gateway.request import Next, Request, refusal

type Form = tuple[str, Literal["regex", "ebnf", "json_schema"], str]


async def grammars(request: Request, forward: Next) -> Response:
    """Answer 400 to a form of the reply that xgrammar does not take.

    vLLM 0.20 then turns to another library for the check, but not for the request, if an earlier one has used xgrammar:
    its engine ends, and all calls with it (vllm issue 43920; mended in its pull request 47312).
    """
    if not (forms := [*_forms(request.body)]):
        return await forward(request)
    # In a thread: importing xgrammar takes seconds, and a deep schema one.
    problem = await asyncio.to_thread(_problem, forms)
    return refusal(400, problem) if problem else await forward(request)


def _forms(body: Mapping[str, Any]) -> Iterator[Form]:
    """Yield each form that a call asks for: its name, its kind, and the text that vLLM makes of it."""
    given, answer, tools = (body.get(name) for name in ("structured_outputs", "response_format", "tools"))
    for name, form in given.items() if isinstance(given, dict) else ():
        match name, form:
            case "regex", str():
                yield "structured_outputs.regex", "regex", form
            case "grammar", str() if "::=" in form:  # vLLM translates Lark's form, which has no such sign
                yield "structured_outputs.grammar", "ebnf", form
            case "choice", list():
                texts = (re.sub(r'(["\\])', r"\\\1", str(each)) for each in form)
                yield "structured_outputs.choice", "ebnf", "root ::= " + " | ".join(f'"{text}"' for text in texts)
            case "json", str() | dict():
                yield "structured_outputs.json", "json_schema", form if isinstance(form, str) else json.dumps(form)
    match answer:
        case {"json_schema": {"schema": dict(schema)}}:
            yield "response_format", "json_schema", json.dumps(schema)
    if body.get("tool_choice") not in (None, "auto", "none"):
        for tool in tools if isinstance(tools, list) else ():
            match tool:
                case {"function": {"name": str(name), "parameters": dict(schema)}}:
                    yield f"tools: {name}", "json_schema", json.dumps(schema)


def _problem(forms: list[Form]) -> str:
    if find_spec("xgrammar") is None:  # where the model server is another machine's
        return ""
    from xgrammar import Grammar

    for name, kind, text in forms:
        try:
            getattr(Grammar, f"from_{kind}")(text)
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0].rpartition(": ")[2][:200]
            return f"{name}: xgrammar does not take it: {why}"
    return ""
