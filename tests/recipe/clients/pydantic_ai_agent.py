"""pydantic-ai: each of its models, streamed."""

import asyncio
import sys

from pydantic_ai import Agent


def model():
    match sys.argv[1]:
        case "responses":
            from pydantic_ai.models.openai import OpenAIResponsesModel

            return OpenAIResponsesModel("any")
        case "messages":
            from pydantic_ai.models.anthropic import AnthropicModel

            return AnthropicModel("any")
        case _:
            from pydantic_ai.models.openai import OpenAIChatModel

            return OpenAIChatModel("any")


player = Agent(model(), instructions="You play a game.", model_settings={"max_tokens": 64})


@player.tool_plain
def look(place: str) -> str:
    """Look at a place."""
    return f"a lamp in the {place}"


async def main() -> None:
    async with player.run_stream("Find the lamp.") as run:
        print(await run.get_output())


asyncio.run(main())
