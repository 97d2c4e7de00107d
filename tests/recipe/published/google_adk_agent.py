"""google-adk's first agent, with a tool, and a model that litellm calls."""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def get_weather(city: str) -> dict:
    """Say how the weather is in a city."""
    return {"status": "success", "report": f"sunny in {city}"}


root_agent = LlmAgent(
    name="weather_agent", model=LiteLlm(model="openai/gpt-4o"), instruction="Use the tools.", tools=[get_weather]
)


async def main() -> None:
    runner = InMemoryRunner(agent=root_agent, app_name="weather")
    session = await runner.session_service.create_session(app_name="weather", user_id="user")
    content = types.Content(role="user", parts=[types.Part(text=sys.argv[1])])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=content):
        if event.is_final_response() and event.content and event.content.parts:
            print(event.content.parts[0].text)


asyncio.run(main())
