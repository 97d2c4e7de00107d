"""autogen's quick start: an assistant with a tool, streamed."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.ui import Console
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def get_weather(city: str) -> str:
    """Say how the weather is in a city."""
    return f"The weather in {city} is 23 degrees and sunny."


async def main() -> None:
    model_client = OpenAIChatCompletionClient(model="gpt-4o")
    agent = AssistantAgent(
        name="weather_agent",
        model_client=model_client,
        tools=[get_weather],
        system_message="You are a helpful assistant.",
        reflect_on_tool_use=True,
        model_client_stream=True,
    )
    await Console(agent.run_stream(task=sys.argv[1]))
    await model_client.close()


asyncio.run(main())
