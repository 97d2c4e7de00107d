"""openai-agents' first agent with a tool, streamed."""

import asyncio
import sys

from agents import Agent, Runner, function_tool


@function_tool
def get_weather(city: str) -> str:
    """Say how the weather is in a city."""
    return f"The weather in {city} is sunny."


agent = Agent(name="Hello world", instructions="You are a helpful agent.", tools=[get_weather])


async def main() -> None:
    result = Runner.run_streamed(agent, input=sys.argv[1])
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
