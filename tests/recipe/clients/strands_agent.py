"""strands, which streams, with its Anthropic model."""

from strands import Agent, tool
from strands.models.anthropic import AnthropicModel


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"a lamp in the {place}"


model = AnthropicModel(model_id="any", max_tokens=64)
player = Agent(model, tools=[look], system_prompt="You play a game.", callback_handler=None)
print(str(player("Find the lamp.")).strip())
