"""The scripted model of ``empo2 init``: it answers with given texts and tool calls, in the requested form."""

import base64
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, cycle, repeat
from typing import Any

import numpy as np

Body = dict[str, Any]
_DEPTH = 12  # of a schema
_DIMENSIONS = 1536  # of OpenAI's text-embedding-3-small
_LOG_PROB, _WORD = -0.1, re.compile(r"\s*\S+")


class Script:
    """What the model says, call by call.

    Args:
        replies: in their order, the last one again and again; "1" where there are none. Each is a text, a tool call
            ``{"name": ..., "arguments": {...}}``, or JSON that fits a requested schema. Where a schema is requested, or
            a tool is forced, a text is the value of the enum that has it, and of free texts. If none is a tool call,
            each tool that is offered is called once in a chat before the next reply is given.
    """

    def __init__(self, replies: Sequence[str] = ()) -> None:
        self._replies = chain(replies, repeat(replies[-1] if replies else "1"))
        self._calls_tools = not any(isinstance(given := _parsed(reply), dict) and "name" in given for reply in replies)
        self._turns: dict[str, Iterator[Any]] = {}  # of the values of each enum

    def choice(self, body: Body) -> Body:
        """Return one choice of the answer to a chat completion or completion request.

        Raises:
            AttributeError, LookupError, TypeError, ValueError: the request is malformed.
        """
        if "messages" not in body:
            if body.get("prompt") is None:
                raise ValueError("there is no prompt")
            text = next(self._replies)
            return {"text": text, "logprobs": _completion_log_probs(text) if body.get("logprobs") is not None else None}
        called = sum(bool(message.get("tool_calls")) for message in body["messages"])
        wanted = body.get("tool_choice")
        tools = [] if wanted == "none" else [tool["function"] for tool in body.get("tools") or []]
        named = wanted["function"]["name"] if isinstance(wanted, dict) else None
        forced = [each for each in tools if each["name"] == named or wanted == "required"]
        if tools and not forced and self._calls_tools and called < len(tools):
            return _called(tools[called], self.sample(tools[called].get("parameters") or {}, "1"), called)
        text = next(self._replies)
        given = _parsed(text)
        if isinstance(given, dict) and (own := [each for each in tools if each["name"] == given.get("name")]):
            return _called(own[0], given.get("arguments") or {}, called)
        if forced:
            function = forced[called % len(forced)]
            fitting = given if isinstance(given, dict) else self.sample(function.get("parameters") or {}, text)
            return _called(function, fitting, called)
        schema = ((body.get("response_format") or {}).get("json_schema") or {}).get("schema")
        if schema and not isinstance(given, dict | list):
            text = json.dumps(self.sample(schema, text))
        elif (body.get("response_format") or {}).get("type") == "json_object" and not isinstance(given, dict):
            text = json.dumps({"reply": text})
        log_probs = {"logprobs": {"content": _chat_log_probs(text)}} if body.get("logprobs") else {}
        return {"message": {"role": "assistant", "content": text}, **log_probs}

    def sample(self, schema: Any, text: str, root: Any = None, depth: int = 0) -> Any:
        """Return a value that fits a JSON schema of the usual kind, with the text in it where it can be.

        Of an enum without it the values take turns, so that a supervisor that chooses a worker comes to an end. A
        schema that is none, such as `true`, or that contains itself without end, is one of texts.
        """
        root = schema if root is None else root
        if not isinstance(schema, dict) or depth > _DEPTH:
            return text
        inner = partial(self.sample, text=text, root=root, depth=depth + 1)
        if reference := schema.get("$ref"):
            return inner(_referred(root, reference))
        if values := schema.get("enum"):
            return text if text in values else next(self._turns.setdefault(json.dumps(values), cycle(values)))
        if "const" in schema:
            return schema["const"]
        for key in ("anyOf", "oneOf", "allOf"):
            if schema.get(key):
                return inner(schema[key][0])
        if "examples" in schema or "default" in schema:
            return [*schema.get("examples", ()), schema.get("default")][0]
        match schema.get("type"):
            case "object":
                properties = schema.get("properties", {})
                return {name: inner(properties.get(name)) for name in schema.get("required", properties)}
            case "array":
                return [inner(schema.get("items")) for _ in range(schema.get("minItems", 0))]
            case "integer" | "number":
                number = _parsed(text)
                return _within(number if type(number) in (int, float) else 1, schema)
            case "boolean":
                return True
            case _:
                return text[: schema.get("maxLength")].ljust(schema.get("minLength", 0), ".")


def _within(number: float, schema: Body) -> float:
    """Return a number that the bounds of a schema let in, the given one if they do."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    closed = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
    for tried in (number, low, high, low + 1, high - 1, (low + high) / 2):
        if math.isfinite(tried) and low <= tried <= high and tried not in closed:
            return int(tried) if schema["type"] == "integer" else tried
    return number


def _chat_log_probs(text: str) -> list[Body]:
    """Return made-up log-probabilities, a word a token."""
    of = [{"token": word, "logprob": _LOG_PROB, "bytes": [*word.encode()]} for word in _WORD.findall(text)]
    return [{**each, "top_logprobs": [each]} for each in of]


def _completion_log_probs(text: str) -> Body:
    words = _WORD.findall(text)
    return {
        "tokens": words,
        "token_logprobs": [_LOG_PROB] * len(words),
        "top_logprobs": [{word: _LOG_PROB} for word in words],
        "text_offset": [found.start() for found in _WORD.finditer(text)],
    }


def _referred(root: Any, reference: str) -> Any:
    """Return the part of a schema that ``#/$defs/NAME`` or another path in it names; None if there is none."""
    for name in reference.removeprefix("#").strip("/").split("/"):
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _called(function: Body, arguments: Any, called: int) -> Body:
    """Return the choice of a tool; `called`: calls so far, which names it."""
    named = {"name": function["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": f"call-{called}", "type": "function", "function": named}
    return {"message": {"role": "assistant", "content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def embeddings(body: Body) -> Body:
    """Return made-up embeddings: a unit vector for each input, of the size that is asked for; equal for equal texts."""
    inputs = body.get("input")
    texts = inputs if isinstance(inputs, list) and not all(isinstance(each, int) for each in inputs) else [inputs]
    size, data = body.get("dimensions") or _DIMENSIONS, []
    for index, text in enumerate(texts):
        vector = np.zeros(size, np.float32)
        vector[zlib.crc32(json.dumps(text).encode()) % size] = 1
        as_text = body.get("encoding_format") == "base64"
        value = base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
    return {"object": "list", "data": data, "model": str(body.get("model")), "usage": usage}
