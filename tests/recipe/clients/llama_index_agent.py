"""llama-index: a FunctionAgent, which streams."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def look(place: str) -> str:
    """Look at a place."""
    return f"a lamp in the {place}"


async def main() -> None:
    llm = OpenAILike(
        model="any",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=64,
    )
    player = FunctionAgent(tools=[look], llm=llm, system_prompt="You play a game.")
    print(await player.run("Find the lamp."))


asyncio.run(main())
