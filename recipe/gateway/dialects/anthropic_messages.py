"""Anthropic's ``/v1/messages``: whole chats, or threads, of which a request sends what is new; streamed or not."""

import json
from collections.abc import Iterator, Sequence
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
    tool_call,
    tool_result,
    warn_not_offered,
)
from empo2.recipe.messages import Message, arguments_of

# Fields of Anthropic's own that say nothing about the reply of a model that is not Anthropic's, or are translated. All
# others (temperature, top_p, top_k, and vLLM's own) mean the same in a chat completion.
_OWN = (
    "messages",
    "system",
    "tools",
    "tool_choice",
    "stop_sequences",
    "stream",
    "metadata",
    "thinking",
    "service_tier",
    "context_management",
    "output_config",
    "output_format",
    "cache_control",
    "inference_geo",
    "thread",
)
_OF_THREAD = ("system", "tools")  # a request that continues a thread does not repeat them
_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset")  # by Anthropic's servers
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicCall:
    """A call of ``/v1/messages``.

    Args:
        threads: of the rollout: by the id of each reply, the chat up to it. The answer is added to them, if the request
            begins or continues a thread.

    Raises:
        ValueError: it asks for what no chat completion has, such as MCP servers or a PDF file, or continues a reply of
            no thread.
    """

    path = "chat/completions"

    def __init__(self, body: Body, threads: dict[str, Body]) -> None:
        for name in ("mcp_servers", "container"):
            if body.get(name):
                raise ValueError(f"{name}: needs Anthropic's own servers; leave it out")
        self._stream, self._threaded, self._threads = bool(body.get("stream")), bool(body.get("thread")), threads
        body = self._whole = _with_thread(body, threads)
        self.body = {name: value for name, value in body.items() if name not in _OWN}
        self.body["messages"] = _chat(body)
        if self.body["messages"][-1]["role"] == "assistant":  # the reply continues it
            self.body |= {"continue_final_message": True, "add_generation_prompt": False}
        if body.get("stop_sequences"):
            self.body["stop"] = body["stop_sequences"]
        self.body |= _offered(body.get("tools") or [], body.get("tool_choice"))
        form = (body.get("output_config") or {}).get("format") or body.get("output_format")
        if form and form.get("type") == "json_schema":
            schema = {"name": "reply", "schema": form["schema"]}
            self.body["response_format"] = {"type": "json_schema", "json_schema": schema}

    def answer(self, completion: Body) -> Response:
        message = _reply(completion)
        if self._threaded:
            said = {"role": "assistant", "content": message["content"]}
            chat = {name: self._whole[name] for name in _OF_THREAD if name in self._whole}
            keep(self._threads, message["id"], {**chat, "messages": [*self._whole["messages"], said]})
        return event_stream(_events(message)) if self._stream else JSONResponse(message)

    def waiting(self) -> str:
        return _event("ping")

    def failed(self, answer: Response) -> str:
        return event(error_of(answer, anthropic=True), "error")


def _with_thread(body: Body, threads: dict[str, Body]) -> Body:
    """Return the request with all messages of the thread that it continues, if it does."""
    thread = body.get("thread") or {"type": "create"}
    kind, previous = thread.get("type"), thread.get("previous_message_id")
    if kind == "create":
        return body
    if kind != "continue":
        raise ValueError(f"thread.type={kind!r}: must be create or continue")
    if previous not in threads:
        raise ValueError(f"thread.previous_message_id={previous!r}: no reply of a thread of this rollout")
    earlier = threads[previous]
    return {**body, **earlier, "messages": [*earlier["messages"], *body["messages"]]}


def _chat(body: Body) -> list[Message]:
    chat: list[Message] = []
    if system := body.get("system"):
        text = system if isinstance(system, str) else "".join(_text(block, "system") for block in system)
        chat.append({"role": "system", "content": text})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list of at least one message")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        content = message.get("content") if isinstance(message, dict) else None
        match message:
            case {"role": "assistant"}:
                chat.append(_said(_blocks(content, where), where))
            case {"role": "system"}:
                chat.append({"role": "system", "content": "".join(_texts(content, where))})
            case {"role": "user"}:
                chat += _heard(_blocks(content, where), where)
            case _:
                raise ValueError(f"{where}.role: must be user, assistant or system")
    return chat


def _blocks(content: Any, where: str) -> Sequence[Body]:
    if isinstance(content, str):
        return [text_part(content)]
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise ValueError(f"{where}.content: must be a string or a list of blocks")


def _said(blocks: Sequence[Body], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                calls.append(tool_call(block.get("id"), block.get("name"), arguments))
            case _:
                texts.append(_text(block, where))
    return {"role": "assistant", "content": "".join(texts), "reasoning": "".join(thoughts), "tool_calls": calls}


def _heard(blocks: Sequence[Body], where: str) -> Iterator[Message]:
    """Yield the results of tools, each a message of its own, then what the user says."""
    parts: list[Body] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            inner = [_part(each, where) for each in _blocks(block.get("content") or "", where)]
            result, images = tool_result(block.get("tool_use_id"), inner)
            yield result
            parts += images
        else:
            parts.append(_part(block, where))
    if parts:
        yield {"role": "user", "content": parts}


def _part(block: Body, where: str) -> Body:
    match block:
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return image_part(url)
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return image_part(f"data:{kind};base64,{data}")
        case {"type": "image"}:
            raise ValueError(f"{where}: an image's source must be a url, or base64 with a media_type")
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            lines = [block.get("title"), block.get("context"), text]
        case {"type": "document", "source": {"type": "content", "content": content}}:
            lines = [block.get("title"), block.get("context"), *_texts(content, where)]
        case {"type": "document"}:
            source = block.get("source")
            kind = source.get("type") if isinstance(source, dict) else None
            raise ValueError(f"{where}: a document of type {kind!r} needs Anthropic's own servers; send its text")
        case {"type": "search_result"}:
            lines = [block.get("title"), block.get("source"), *_texts(block.get("content"), where)]
        case {"type": "tool_reference"}:  # to one whose definition the prompt has already
            lines = [str(block["tool_name"])]
        case _:
            lines = [_text(block, where)]
    return text_part("\n".join(filter(None, lines)))


def _texts(content: Any, where: str) -> list[str]:
    return [_text(block, where) for block in _blocks(content, where)]


def _text(block: Any, where: str) -> str:
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return block["text"]
    kind = block.get("type") if isinstance(block, dict) else None
    raise ValueError(f"{where}: a block of type {kind!r} cannot be given to the model; send text, images or tool calls")


def _offered(tools: Sequence[Any], choice: Any) -> Body:
    """Return the fields of a chat completion for tools and the choice among them.

    What Anthropic's servers run themselves (web search and the like) is left out. Tools that are to be loaded later
    (``defer_loading``) are offered at once, since a prompt whose tools change opens a training row.

    Raises:
        ValueError: a tool has no schema, or the choice is of no kind that there is, or of a tool that is not offered.
    """
    functions, hosted = [], set()
    for number, tool in enumerate(tools):
        match tool:
            case {"type": str(kind)} if kind.startswith(_HOSTED):
                warn_not_offered(kind, "Anthropic")
                hosted.add(tool.get("name"))
            case {"name": name} if tool.get("type", "custom") == "custom":
                schema = tool.get("input_schema") or {"type": "object", "properties": {}}
                described = {"description": tool["description"]} if tool.get("description") else {}
                # In the order of OpenAI's clients: chat templates write tools as they come.
                function = {"name": name, **described, "parameters": schema}
                functions.append({"type": "function", "function": function})
            case _:
                kind = tool.get("type") if isinstance(tool, dict) else None
                problem = f"{kind!r}: only Anthropic's models know its schema; give it an input_schema"
                raise ValueError(f"tools[{number}]: {problem}")
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


def _choice(choice: Any) -> str | Body:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise ValueError(f"tool_choice.type={kind!r}: must be auto, any, tool or none")
    return _CHOICES[kind]


def _reply(completion: Body) -> Body:
    choice = completion["choices"][0]
    (thoughts, text, calls), stopped = said_in(choice["message"]), choice.get("stop_reason")
    content: list[Body] = [{"type": "thinking", "thinking": thoughts, "signature": ""}] if thoughts else []
    if text is not None:
        content.append(text_part(text))
    for call in calls:
        function, arguments = call["function"], arguments_of(call["function"])
        # Arguments that are no object become one, for the tool to refuse.
        given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    reason = _STOP_REASONS.get(choice.get("finish_reason"), "end_turn")
    if reason == "end_turn":
        reason = "tool_use" if calls else "stop_sequence" if isinstance(stopped, str) else reason
    usage = completion.get("usage") or {}
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stopped if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": usage.get("prompt_tokens", 0),
            "output_tokens": usage.get("completion_tokens", 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _events(message: Body) -> Iterator[str]:
    usage = message["usage"]
    start = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**start, "usage": {**usage, "output_tokens": 0}})
    for index, block in enumerate(message["content"]):
        match block["type"]:
            case "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            case "thinking":
                empty, delta = {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
            case _:
                written = json.dumps(block["input"], ensure_ascii=False)
                empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield _event("message_delta", delta=ended, usage=usage)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)
