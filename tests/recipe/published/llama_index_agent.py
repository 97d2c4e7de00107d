"""llama-index's starter: a FunctionAgent, which streams."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


agent = FunctionAgent(
    tools=[multiply], llm=OpenAI(model="gpt-4o-mini"), system_prompt="You are a helpful assistant that can multiply."
)


async def main() -> None:
    print(await agent.run(sys.argv[1]))


asyncio.run(main())
