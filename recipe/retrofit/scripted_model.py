"""The scripted model of ``empo2 init``: it answers with given texts, in the requested form."""

import json
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]


def answer_choice(body: Body, script: Iterator[str]) -> Body:
    """Return one choice of the answer to a chat completion or completion request.

    If tools are offered, each is called once before a text is given. If a JSON schema is requested, the answer is a
    value that fits it.
    """
    if "messages" not in body:
        return {"text": next(script), "logprobs": None}
    messages, tools = body["messages"], body.get("tools") or []
    called = sum(bool(message.get("tool_calls")) for message in messages)
    if tools and (called < len(tools) or body.get("tool_choice") == "required"):
        function = tools[called % len(tools)]["function"]
        arguments = json.dumps(sample(function.get("parameters") or {}))
        call = {"name": function["name"], "arguments": arguments}
        calls = [{"id": f"call-{called}", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"message": message, "finish_reason": "tool_calls"}
    schema = ((body.get("response_format") or {}).get("json_schema") or {}).get("schema")
    return {"message": {"role": "assistant", "content": json.dumps(sample(schema)) if schema else next(script)}}


def sample(schema: Body, root: Body | None = None) -> Any:
    """Return a value that fits a JSON schema of the usual kind."""
    root = schema if root is None else root
    if reference := schema.get("$ref"):
        return sample(root["$defs"][reference.rpartition("/")[2]], root)
    for key in ("enum", "examples"):
        if key in schema:
            return schema[key][0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return sample(schema[key][0], root)
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            return {name: sample(properties[name], root) for name in schema.get("required", properties)}
        case "array":
            return [sample(schema.get("items", {}), root)] * schema.get("minItems", 0)
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case _:
            return "1"
