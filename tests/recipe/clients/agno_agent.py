"""agno, streamed: its /responses and its Anthropic model."""

import sys

from agno.agent import Agent
from agno.run.agent import RunEvent


def look(place: str) -> str:
    """Look at a place."""
    return f"a lamp in the {place}"


def model():
    if sys.argv[1] == "messages":
        from agno.models.anthropic import Claude

        return Claude(id="any", max_tokens=64)
    from agno.models.openai import OpenAIResponses

    return OpenAIResponses(id="any", max_output_tokens=64)


player = Agent(model=model(), tools=[look], system_message="You play a game.", telemetry=False)
said = player.run("Find the lamp.", stream=True, stream_events=True)
print([event for event in said if getattr(event, "event", None) == RunEvent.run_completed][-1].content)
