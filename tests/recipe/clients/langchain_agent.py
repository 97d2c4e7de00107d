"""langchain: chat completions, /responses and Anthropic's messages, each streamed."""

import os
import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"a lamp in the {place}"


def model():
    if sys.argv[1] == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model_name="any", max_tokens_to_sample=64, timeout=30, stop=None, streaming=True)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="any", streaming=True, use_responses_api=sys.argv[1] == "responses")


chat = model().bind_tools([look])
messages: list = [SystemMessage("You play a game."), HumanMessage("Find the lamp.")]
while True:
    reply: Any = None
    for chunk in chat.stream(messages):
        reply = chunk if reply is None else reply + chunk
    messages.append(reply)
    if not reply.tool_calls:
        break
    messages += [ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]) for call in reply.tool_calls]
assert os.environ["OPENAI_BASE_URL"]
print(reply.text)
