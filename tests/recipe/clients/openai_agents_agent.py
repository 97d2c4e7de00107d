"""openai-agents with chat completions, streamed."""

import asyncio

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool


@function_tool
def look(place: str) -> str:
    """Look at a place.

    Args:
        place: where
    """
    return f"a lamp in the {place}"


async def main() -> None:
    player = Agent("player", instructions="You play a game.", tools=[look], model="any")
    provider = OpenAIProvider(use_responses=False)
    config = RunConfig(model_provider=provider, tracing_disabled=True, model_settings=ModelSettings(max_tokens=64))
    run = Runner.run_streamed(player, "Find the lamp.", run_config=config)
    async for _ in run.stream_events():
        pass
    print(run.final_output)


asyncio.run(main())
