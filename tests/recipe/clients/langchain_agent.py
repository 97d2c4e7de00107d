"""langchain with Anthropic's messages, streamed."""

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"a lamp in the {place}"


model = ChatAnthropic(model_name="any", max_tokens_to_sample=64, timeout=30, stop=None, streaming=True)
chat = model.bind_tools([look])
messages: list = [SystemMessage("You play a game."), HumanMessage("Find the lamp.")]
while True:
    reply: Any = None
    for chunk in chat.stream(messages):
        reply = chunk if reply is None else reply + chunk
    messages.append(reply)
    if not reply.tool_calls:
        break
    messages += [ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]) for call in reply.tool_calls]
print(reply.text)
