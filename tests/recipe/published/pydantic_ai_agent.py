"""pydantic-ai's game of dice, with two tools."""

import random
import sys

from pydantic_ai import Agent, RunContext

agent = Agent(
    "openai:gpt-4o", deps_type=str, instructions="You run a game of dice: roll, and see if it is the player's guess."
)


@agent.tool_plain
def roll_dice() -> str:
    """Roll a die with six sides."""
    return str(random.Random(0).randint(1, 6))


@agent.tool
def get_player_name(ctx: RunContext[str]) -> str:
    """Get the player's name."""
    return ctx.deps


print(agent.run_sync(sys.argv[1], deps="Anne").output)
