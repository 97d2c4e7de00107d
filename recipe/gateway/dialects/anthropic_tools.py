"""The tools of Anthropic's ``/messages`` as functions, which is all that a chat completion has.

What Anthropic's servers run themselves (web search and the like) is left out: the model is not offered it. Tools that
are to be loaded later (``defer_loading``) are offered at once, since a prompt whose tools change opens a training row.
"""

from collections.abc import Sequence
from typing import Any

from empo2.recipe.gateway.dialects.dialect import Body, warn_not_offered

_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def offered(tools: Sequence[Any], choice: Any) -> Body:
    """Return the fields of a chat completion for tools and the choice among them.

    Raises:
        ValueError: a tool has no schema, or the choice is of no kind that there is, or of a tool that is not offered.
    """
    functions, hosted = [], set()
    for number, tool in enumerate(tools):
        if (kind := _hosted(tool)) is None:
            functions.append(_function(tool, f"tools[{number}]"))
        else:
            warn_not_offered(kind, "Anthropic")
            hosted.add(tool.get("name"))
    fields: Body = {"tools": functions} if functions else {}
    if choice:
        chosen = _choice(choice)
        if isinstance(chosen, dict) and (name := choice.get("name")) in hosted:
            raise ValueError(f"tool_choice.name={name!r}: needs Anthropic's own servers; choose another tool")
        if functions or not hosted:
            fields["tool_choice"] = chosen
        if functions and choice.get("disable_parallel_tool_use"):
            fields["parallel_tool_calls"] = False
    return fields


def _hosted(tool: Any) -> str | None:
    """Return the type of a tool that Anthropic's servers run; None for any other."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind.startswith(_HOSTED) else None


def _function(tool: Any, where: str) -> Body:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or "name" not in tool:
        kind = tool.get("type") if isinstance(tool, dict) else None
        raise ValueError(f"{where}: {kind!r}: only Anthropic's models know its schema; give it an input_schema")
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    described = {"description": tool["description"]} if tool.get("description") else {}
    # In the order of OpenAI's clients: chat templates write tools as they come.
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": schema}}


def _choice(choice: Any) -> str | Body:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise ValueError(f"tool_choice.type={kind!r}: must be auto, any, tool or none")
    return _CHOICES[kind]
