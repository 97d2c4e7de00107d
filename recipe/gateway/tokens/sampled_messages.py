"""Put sampled replies back into a chat where the client has changed them on their way.

Clients add defaults of a tool's schema, mend or drop arguments that are no JSON, and drop thoughts. The chat would then
no longer extend what the model saw, and each such reply would open a training row.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from empo2.recipe.gateway.normal_form import normal_message
from empo2.recipe.gateway.request import Body
from empo2.recipe.messages import Message, arguments_of, text_of


class SampledMessages:
    """The messages that a policy replied with in one episode, known by the ids of their tool calls or by their text."""

    def __init__(self) -> None:
        self._by_call: dict[str, _Sampled] = {}
        self._by_text: defaultdict[str, list[Message]] = defaultdict(list)  # of those without calls, in their order

    def add(self, message: Message) -> None:
        """Keep a reply, as the model server gave it."""
        form = normal_message(message)
        if calls := message.get("tool_calls"):
            parsed = all(isinstance(arguments_of(call["function"]), dict) for call in calls)
            self._by_call |= {call["id"]: _Sampled(form, parsed) for call in calls}
        elif form not in (same := self._by_text[_text(form)]):
            same.append(form)

    def restored(self, body: Body) -> Body:
        """Return a chat in normal form with its replies as they were sampled.

        A reply is put back if its tools and their arguments agree after the schema's defaults, or if the sampled
        arguments did not parse. Any other change is the agent's own, and stays.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not (self._by_call or self._by_text):
            return body
        defaults, seen = _defaults(body.get("tools")), Counter[str]()
        chat = [(each.get("role") == "assistant" and self._sampled(each, defaults, seen)) or each for each in messages]
        return body if chat == messages else {**body, "messages": chat}

    def _sampled(self, message: Message, defaults: Mapping[str, Body], seen: Counter[str]) -> Message | None:
        text, calls = _text(message), message.get("tool_calls")
        if not calls:
            seen[text] += 1
            same = self._by_text.get(text, [])
            return same[min(seen[text], len(same)) - 1] if same else None
        sampled = self._by_call.get(calls[0].get("id"))
        if sampled is None or text not in ("", _text(sampled.message)):
            return None
        given, own = ([_filled(call, defaults) for call in each] for each in (calls, sampled.message["tool_calls"]))
        return sampled.message if given == own or not sampled.parsed else None


@dataclass(frozen=True)
class _Sampled:
    """A reply in normal form; ``parsed`` unless the arguments of one of its tool calls were no JSON object."""

    message: Message
    parsed: bool


def _text(message: Message) -> str:
    return text_of(message.get("content")).strip()


def _defaults(tools: Any) -> dict[str, Body]:
    """Return for each tool the arguments that its schema has defaults for, and these."""
    found = {}
    for tool in tools if isinstance(tools, list) else ():
        match tool:
            case {"function": {"name": str(function), "parameters": {"properties": dict(properties)}}}:
                found[function] = {
                    name: each["default"]
                    for name, each in properties.items()
                    if isinstance(each, dict) and "default" in each  # `true` is a schema, too
                }
    return found


def _filled(call: Body, defaults: Mapping[str, Body]) -> tuple[Any, Body]:
    """Return the name of a call's tool, and its arguments with the defaults of the schema."""
    function = call["function"]
    return function["name"], {**defaults.get(function["name"], {}), **arguments_of(function)}
