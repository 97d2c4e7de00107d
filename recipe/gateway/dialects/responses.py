"""OpenAI's ``/responses``: stateless, or continued by ``previous_response_id``; streamed or not."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

from starlette.responses import JSONResponse, Response

from empo2.recipe.gateway.dialects.dialect import (
    Body,
    error_of,
    event,
    event_stream,
    image_part,
    keep,
    new_id,
    said_in,
    text_part,
    tool_result,
)
from empo2.recipe.gateway.dialects.responses_tools import OfferedTools, call_of
from empo2.recipe.messages import Message

_RECENT = 64  # responses among which the one is looked for that a request goes on from
_NEED_OPENAI = ("background", "conversation", "prompt")
# Repeated in the answer, with the value of a request that does not have them.
_ECHOED = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_SHARED = ("parallel_tool_calls", "temperature", "top_p", "user")  # mean the same in a chat completion
# Translated, or without meaning for a model that is not OpenAI's.
_OWN = {
    *_ECHOED,
    *_NEED_OPENAI,
    "include",
    "input",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream",
    "stream_options",
    "top_logprobs",
}.difference(_SHARED)
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesCall:
    """A call of ``/responses``.

    Args:
        stored: of the rollout: by the id of each response, all items up to and with it. The answer is added to them,
            unless the request says ``store=false``.

    Raises:
        ValueError: the request asks for what no chat completion has, or names a response that is not stored.
    """

    path = "chat/completions"

    def __init__(self, body: Body, stored: dict[str, list[Body]]) -> None:
        for name in _NEED_OPENAI:
            if body.get(name):
                raise ValueError(f"{name}: needs OpenAI's own servers; leave it out")
        self._request, self._stored = body, stored
        self._id, self._created, self._events_sent = new_id("resp"), int(time.time()), 0
        previous = body.get("previous_response_id")
        if previous is not None and previous not in stored:
            raise ValueError(f"previous_response_id={previous!r}: no response of this rollout that was stored")
        earlier = [] if previous is None else stored[previous]
        self._items = [*earlier, *(_resolved(item, stored) for item in _items(body.get("input")))]
        self.body = {name: value for name, value in body.items() if name not in _OWN and value is not None}
        system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        self.body["messages"] = [*system, *_chat(self._items)]
        if body.get("max_output_tokens"):
            self.body["max_completion_tokens"] = body["max_output_tokens"]
        self._tools = OfferedTools(body.get("tools") or [])
        if self._tools.functions:
            self.body["tools"] = self._tools.functions
            if body.get("tool_choice"):
                self.body["tool_choice"] = _tool_choice(body["tool_choice"])
        if effort := (body.get("reasoning") or {}).get("effort"):
            self.body["reasoning_effort"] = effort
        match (body.get("text") or {}).get("format"):
            case {"type": "json_object"}:
                self.body["response_format"] = {"type": "json_object"}
            case {"type": "json_schema", **schema}:
                self.body["response_format"] = {"type": "json_schema", "json_schema": schema}

    def answer(self, completion: Body) -> Response:
        response = self._response(completion)
        if self._request.get("store") is not False:
            keep(self._stored, response["id"], [*_shared(self._items, self._stored), *response["output"]])
        if not self._request.get("stream"):
            return JSONResponse(response)
        begin = () if self._events_sent else self._begin(completion["model"])
        return event_stream(self._numbered(chain(begin, _events(response))))

    def waiting(self) -> str:
        """Return the events that begin a response, then that it is in progress: some clients count events alone."""
        begin = self._begin(str(self._request.get("model") or ""))
        return "".join(self._numbered(begin[1:] if self._events_sent else begin))

    def failed(self, answer: Response) -> str:
        status, problem = answer.status_code, error_of(answer, anthropic=False)["error"]["message"]
        code = "server_error" if status >= 500 else "rate_limit_exceeded" if status == 429 else "invalid_prompt"
        failed = {**self._begun(self._request.get("model")), "status": "failed"}
        failed["error"] = {"code": code, "message": problem}
        return "".join(self._numbered([{"type": "response.failed", "response": failed}]))

    def _numbered(self, events: Iterable[Body]) -> Iterator[str]:
        for data in events:
            yield event({**data, "sequence_number": self._events_sent}, data["type"])
            self._events_sent += 1

    def _begin(self, model: Any) -> list[Body]:
        begun = self._begun(model)
        return [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]

    def _begun(self, model: Any) -> Body:
        """Return the response before there is anything in it."""
        echoed = {name: self._request.get(name) for name in _ECHOED}
        return {
            **{name: _ECHOED[name] if value is None else value for name, value in echoed.items()},
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
        }

    def _response(self, completion: Body) -> Body:
        choice = completion["choices"][0]
        reason = _INCOMPLETE.get(choice.get("finish_reason"))
        status = "incomplete" if reason else "completed"
        usage = completion.get("usage") or {}
        prompt, reply = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        return {
            **self._begun(completion["model"]),
            "status": status,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": _output(choice["message"], status, self._tools),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + reply,
            },
        }


def _items(given: Any) -> list[Body]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list) and all(isinstance(item, dict) for item in given):
        return given
    raise ValueError("input: must be a string or a list of items")


def _resolved(item: Body, stored: dict[str, list[Body]]) -> Body:
    if item.get("type") != "item_reference":
        return item
    for each in chain.from_iterable(reversed(stored.values())):  # it is mostly of the last ones
        if each.get("id") == item.get("id") is not None:
            return each
    raise ValueError(f"input: item_reference {item.get('id')!r}: no item of this rollout that was stored")


def _shared(items: list[Body], stored: dict[str, list[Body]]) -> list[Body]:
    """Return items with those of an earlier response in place of equal ones: many clients send all with each call."""
    recent = islice(reversed(stored.values()), _RECENT)
    earlier = next((each for each in recent if each[:1] == items[:1]), [])
    return [old if old == new else new for old, new in zip_longest(earlier, items)][: len(items)]


def _chat(items: Sequence[Body]) -> list[Message]:
    """Return items as messages: what one reply of the model was split into becomes one message again."""
    chat: list[Message] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                text = "".join(part["text"] for part in _parts(item.get("content"), where) if part["type"] == "text")
                _reply_in(chat, "content")["content"] = text
            case "message":
                if (role := item.get("role")) not in ("user", "system", "developer"):
                    raise ValueError(f"{where}.role={role!r}: must be user, assistant, system or developer")
                chat.append({"role": role, "content": _parts(item.get("content"), where)})
            case "reasoning":
                thoughts = item.get("content") or item.get("summary") or []
                _reply_in(chat, "reasoning")["reasoning"] = "".join(part.get("text") or "" for part in thoughts)
            case "function_call" | "custom_tool_call" | "local_shell_call":
                _reply_in(chat, "tool_calls").setdefault("tool_calls", []).append(call_of(item))
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                result, images = tool_result(item.get("call_id"), _parts(item.get("output"), where))
                chat += [result, {"role": "user", "content": images}] if images else [result]
            case "compaction" | "web_search_call":
                pass  # what OpenAI's servers alone can read, or have done
            case other:
                raise ValueError(f"{where}: an item of type {other!r} cannot be given to the model")
    return chat


def _reply_in(chat: list[Message], part: str) -> Message:
    """Return the reply at the end of the chat that a part belongs to, or a new one: parts come in this order."""
    follows = {"reasoning": (), "content": ("reasoning",), "tool_calls": ("reasoning", "content", "tool_calls")}[part]
    if chat and chat[-1]["role"] == "assistant":
        last = chat[-1]
        if all(name in follows for name in last if name != "role" and last[name] is not None):
            return last
    chat.append({"role": "assistant", "content": None})
    return chat[-1]


def _parts(content: Any, where: str) -> list[Body]:
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        raise ValueError(f"{where}: must have a string or a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            parts.append(text_part(part["text"]))
        elif kind == "refusal":
            parts.append(text_part(str(part.get("refusal"))))
        elif kind == "input_image" and part.get("image_url"):
            parts.append(image_part(part["image_url"]))
        else:
            raise ValueError(f"{where}: a part of type {kind!r} cannot be given to the model; send text or images")
    return parts


def _tool_choice(choice: Any) -> str | Body:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise ValueError(f"tool_choice.type={choice.get('type')!r}: must be auto, none, required or one function")


def _output(message: Message, status: str, tools: OfferedTools) -> list[Body]:
    items: list[Body] = []
    thoughts, text, calls = said_in(message)
    if thoughts:
        parts = [{"type": "reasoning_text", "text": thoughts}]
        items.append({"type": "reasoning", "id": new_id("rs"), "summary": [], "content": parts, "status": status})
    if text is not None:
        parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        told = {"role": "assistant", "content": parts, "status": status}
        items.append({"type": "message", "id": new_id("msg"), **told})
    return items + [tools.item_of(call, status) for call in calls]


def _events(response: Body) -> Iterator[Body]:
    for index, item in enumerate(response["output"]):
        yield from _item_events(index, item)
    yield {"type": f"response.{response['status']}", "response": response}


def _item_events(index: int, item: Body) -> Iterator[Body]:
    where = {"output_index": index, "item_id": item["id"]}
    empty = {"function_call": {"arguments": ""}, "custom_tool_call": {"input": ""}, "local_shell_call": {}}
    begun = {**item, "status": "in_progress", **empty.get(item["type"], {"content": []})}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    match item["type"]:
        case "message":
            part, at = item["content"][0], {**where, "content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
            yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
        case "reasoning":
            text, at = item["content"][0]["text"], {**where, "content_index": 0}
            yield {"type": "response.reasoning_text.delta", **at, "delta": text}
            yield {"type": "response.reasoning_text.done", **at, "text": text}
        case "custom_tool_call":
            yield {"type": "response.custom_tool_call_input.delta", **where, "delta": item["input"]}
            yield {"type": "response.custom_tool_call_input.done", **where, "input": item["input"]}
        case "function_call":
            written = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **where, "delta": written}
            done = {"arguments": written, "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **where, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
