"""strands, which streams: its OpenAI and its Anthropic model."""

import os
import sys

from strands import Agent, tool


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"a lamp in the {place}"


def model():
    if sys.argv[1] == "messages":
        from strands.models.anthropic import AnthropicModel

        return AnthropicModel(model_id="any", max_tokens=64)
    from strands.models.openai import OpenAIModel

    address = {"base_url": os.environ["OPENAI_BASE_URL"]}
    return OpenAIModel(client_args=address, model_id="any", params={"max_tokens": 64})


player = Agent(model(), tools=[look], system_prompt="You play a game.", callback_handler=None)
print(str(player("Find the lamp.")).strip())
