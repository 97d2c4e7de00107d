"""agno's first agent, with a tool, streamed."""

import sys

from agno.agent import Agent
from agno.models.openai import OpenAIChat


def weather(city: str) -> str:
    """Say how the weather is in a city."""
    return f"sunny in {city}"


agent = Agent(model=OpenAIChat(id="gpt-4o"), tools=[weather], instructions="Answer in a few words.", markdown=True)
for event in agent.run(sys.argv[1], stream=True):
    print(getattr(event, "content", None) or "", end="", flush=True)
print()
