"""The tools of OpenAI's ``/responses`` as functions, which is all that a chat completion has, and their calls again.

A namespace's tools become functions with its name before theirs. A custom tool, whose input is free text, and a local
shell become functions of one argument. What OpenAI's servers run themselves (web search and the like) is left out: the
model is not offered it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from empo2.recipe.gateway.dialects.dialect import Body, new_id, tool_call, warn_not_offered
from empo2.recipe.messages import arguments_of

_BETWEEN = "__"
_SHELL = "local_shell"
_FIELDS = ("name", "description", "parameters", "strict")


class OfferedTools:
    """The tools of one request.

    Args:
        tools: as the request has them.

    Attributes:
        functions: as a chat completion has them.

    Raises:
        ValueError: one of them has no name.
    """

    def __init__(self, tools: Sequence[Any]) -> None:
        self.functions: list[Body] = []
        self._kinds: dict[str, tuple[str, str, str]] = {}  # by function: kind, namespace and name of the tool
        for number, tool in enumerate(tools):
            for kind, namespace, described in _described(tool, f"tools[{number}]"):
                name = described["name"]
                function = f"{namespace}{_BETWEEN}{name}" if namespace else name
                self._kinds[function] = kind, namespace, name
                self.functions.append({"type": "function", "function": {**described, "name": function}})

    def item_of(self, call: Body, status: str) -> Body:
        """Return the item of a model's call."""
        function, arguments = call["function"]["name"], call["function"]["arguments"]
        kind, namespace, name = self._kinds.get(function, ("function", "", function))
        item: Body = {"call_id": call["id"], "status": status}
        given = arguments_of(call["function"])
        if kind == "custom":
            text = given.get("input") if isinstance(given, dict) else None
            text = text if isinstance(text, str) else str(arguments)
            return {"type": "custom_tool_call", "id": new_id("ctc"), "name": name, "input": text, **item}
        if kind == _SHELL and isinstance(given, dict) and isinstance(given.get("command"), list):
            action = {"type": "exec", "env": {}, **given}
            return {"type": "local_shell_call", "id": new_id("lsh"), "action": action, **item}
        spaced = {"namespace": namespace} if namespace else {}
        return {"type": "function_call", "id": new_id("fc"), "name": name, **spaced, "arguments": arguments, **item}


def call_of(item: Body) -> Body:
    """Return the call of a function that an item stands for."""
    match item["type"]:
        case "custom_tool_call":
            return tool_call(item.get("call_id"), item.get("name"), json.dumps({"input": item.get("input") or ""}))
        case "local_shell_call":
            given = {name: value for name, value in (item.get("action") or {}).items() if name not in ("type", "env")}
            return tool_call(item.get("call_id"), _SHELL, json.dumps(given))
        case _:
            name = f"{item['namespace']}{_BETWEEN}{item.get('name')}" if item.get("namespace") else item.get("name")
            return tool_call(item.get("call_id"), name, str(item.get("arguments") or "{}"))


def _described(tool: Any, where: str) -> Iterator[tuple[str, str, Body]]:
    """Yield kind, namespace and function of a tool, or of all tools of a namespace."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    match kind:
        case "function":
            yield kind, "", _function(tool, where)
        case "namespace":
            for each in tool.get("tools") or []:
                if isinstance(each, dict) and each.get("type", "function") == "function":
                    yield "function", str(tool.get("name")), _function(each, where)
        case "custom":
            form, text = tool.get("format") or {}, tool.get("description") or ""
            if "definition" in form:
                text += f"\n\nThe input follows this {form.get('syntax')} grammar:\n{form['definition']}"
            described = {**tool, "description": text, "parameters": _object(input={"type": "string"})}
            yield kind, "", _function(described, where)
        case "local_shell":
            command = {"type": "array", "items": {"type": "string"}}
            described = {"name": _SHELL, "description": "Run a command on the user's machine."}
            yield _SHELL, "", {**described, "parameters": _object(command=command)}
        case _ if isinstance(kind, str):
            warn_not_offered(kind, "OpenAI")
        case _:
            raise ValueError(f"{where}.type={kind!r}: must be a tool, such as a function")


def _function(tool: Body, where: str) -> Body:
    if not isinstance(tool.get("name"), str):
        raise ValueError(f"{where}.name={tool.get('name')!r}: must be a text")
    return {name: tool[name] for name in _FIELDS if tool.get(name) is not None}


def _object(**properties: Body) -> Body:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
