"""The normal form of a request: what the model's template and vLLM take, and the same for the same turn.

Clients write one chat in many ways, and agents put marks into it that move from call to call. Digests, states, tips and
rows see the normal form alone. What an agent does differently is a rule here, not a case elsewhere.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from starlette.responses import Response

from empo2.recipe.gateway.request import Body, Next, Request
from empo2.recipe.messages import Message, arguments_of, text_of

LEFT_OUT = "empo2.left_out"  # in the ASGI scope: `header_lines` of the chat, for `empo2 init`
_MARKS = ("cache_control", "prompt_cache_breakpoint")  # which move to the newest messages with each call
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # vLLM 0.20 refuses these
_REPLY = ("role", "name", "content", "reasoning", "tool_calls")  # of an assistant's message, what is rendered
# What a client writes before the system message in the form of HTTP's headers, such as the price of this call.
_HEADER_LINES = re.compile(r"\A(?:[ \t]*x-[a-z0-9-]+:[^\n]*(?:\n\s*|\Z))+", re.IGNORECASE)
_HEADER_NAME = re.compile(r"^[ \t]*(x-[a-z0-9-]+):", re.IGNORECASE | re.MULTILINE)


async def normal_form(arguments: Mapping[str, Any], request: Request, forward: Next) -> Response:
    """Bring a completion into its normal form; stands behind the dialects.

    Args:
        arguments: of the model's chat template (``model.chat_template_kwargs``), for each chat; what the agent gives
            itself stays. Tip-free prompts and reflections take the arguments of the chat that they belong to.
    """
    form = normal(request.body)
    if arguments and "messages" in form:
        form["chat_template_kwargs"] = {**arguments, **(form.get("chat_template_kwargs") or {})}
    if form != request.body:
        if isinstance(messages := request.body.get("messages"), list):
            request.scope[LEFT_OUT] = header_lines(messages)
        request = request.with_body(form)
    return await forward(request)


def normal(body: Body) -> Body:
    """Return a chat completion or a completion in its normal form.

    - a prompt that is a list of one text is that text;
    - ``developer`` is ``system``; leading system messages are one, without lines in the form of HTTP's headers;
    - a later system message, which templates refuse, is a reminder in the user's turn;
    - marks of a cache are left out, and a content of one text part is that text;
    - thoughts are under ``reasoning``; what else a client keeps of a reply is left out;
    - arguments of a tool call that are no JSON object are ``{}``: vLLM refuses any other. The trained row keeps what
      was sampled;
    - efforts that vLLM refuses are the nearest ones that it takes.
    """
    form = dict(body)
    if isinstance(prompt := body.get("prompt"), list) and len(prompt) == 1 and isinstance(prompt[0], str):
        form["prompt"] = prompt[0]
    if isinstance(effort := body.get("reasoning_effort"), str):
        form["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if isinstance(tools := body.get("tools"), list):
        form["tools"] = [_unmarked(tool) for tool in tools]
    if isinstance(messages := body.get("messages"), list):
        form["messages"] = _with_one_system_message([normal_message(message) for message in messages])
    return form


def header_lines(messages: Sequence[Message]) -> list[str]:
    """Return the names of the header lines that the normal form leaves out of the leading system messages."""
    lead = takewhile(lambda message: message.get("role") in ("system", "developer"), messages)
    found = (_HEADER_LINES.match(text_of(message.get("content"))) for message in lead)
    return [name for match in found if match for name in _HEADER_NAME.findall(match[0])]


def normal_message(message: Message) -> Message:
    """Return one message in its normal form: of an assistant's what is rendered, of others all but marks."""
    form = _unmarked(message)
    if isinstance(content := form.get("content"), list):
        parts = [_unmarked(part) for part in content]
        alone = parts[0].get("text") if len(parts) == 1 else None
        form["content"] = alone if isinstance(alone, str) else parts
    if form["role"] == "developer":
        form["role"] = "system"
    if form["role"] != "assistant":
        return form
    form["reasoning"] = form.get("reasoning") or form.get("reasoning_content")
    if calls := form.get("tool_calls"):
        form["tool_calls"] = [_normal_call(call) for call in calls]
        form["content"] = form.get("content") or None
    else:
        form["content"] = form.get("content") or ""
    return {key: form[key] for key in _REPLY if form.get(key) or key == "content"}


def _normal_call(call: Body) -> Body:
    function = call.get("function", {})
    given = arguments_of(function)
    arguments = json.dumps(given if isinstance(given, dict) else {}, ensure_ascii=False)
    named = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": named}


def _unmarked(value: Any) -> Any:
    return {key: each for key, each in value.items() if key not in _MARKS} if isinstance(value, dict) else value


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    lead = next((place for place, each in enumerate(messages) if each["role"] != "system"), len(messages))
    texts = [_HEADER_LINES.sub("", text_of(each.get("content"))) for each in messages[:lead]]
    system = "\n\n".join(filter(None, texts))
    chat: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in messages[lead:]:
        if message["role"] != "system":
            chat.append(message)
            continue
        reminder = f"<system-reminder>\n{text_of(message.get('content'))}\n</system-reminder>"
        if chat and chat[-1]["role"] == "user":
            chat[-1] = _with_text(chat[-1], reminder)
        else:
            chat.append({"role": "user", "content": reminder})
    return chat


def _with_text(message: Message, text: str) -> Message:
    """Return a message with a text after its own; text content stays text, parts stay parts."""
    content = message.get("content")
    added = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content or ''}\n\n{text}"
    return {**message, "content": added}
