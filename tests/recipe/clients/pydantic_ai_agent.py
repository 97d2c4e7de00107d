"""pydantic-ai with Anthropic's messages, streamed."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel

player = Agent(AnthropicModel("any"), instructions="You play a game.", model_settings={"max_tokens": 64})


@player.tool_plain
def look(place: str) -> str:
    """Look at a place."""
    return f"a lamp in the {place}"


async def main() -> None:
    async with player.run_stream("Find the lamp.") as run:
        print(await run.get_output())


asyncio.run(main())
