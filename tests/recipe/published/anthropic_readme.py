"""The README of Anthropic's client for Python: a tool that the client runs, streamed."""

import sys

from anthropic import Anthropic, beta_tool

client = Anthropic()


@beta_tool
def get_weather(location: str) -> str:
    """Look up the weather of a place.

    Args:
        location: The city
    """
    return f"20 degrees and sunny in {location}"


runner = client.beta.messages.tool_runner(
    max_tokens=1024,
    model="claude-sonnet-4-5",
    tools=[get_weather],
    messages=[{"role": "user", "content": sys.argv[1]}],
    stream=True,
)
for stream in runner:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
