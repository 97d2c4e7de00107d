"""openai-agents, whose import name is `agents`: the environment's step is a tool.

It speaks chat completions here; its default, the /responses API, is trained as well. An episode is one
training row as long as the chat template renders each call as the model wrote it. A call that the model wrote
differently, or that the parser repaired, starts a new row.

This checkout has a folder of the same name. It has no `__init__.py`, so that the package takes precedence.
"""

import asyncio
from contextlib import suppress

from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    ToolsToFinalOutputResult,
    TResponseInputItem,
    function_tool,
)
from openai import AsyncOpenAI

from empo2.agents.scienceworld.game import Game
from empo2.agents.text_game.agent import Server

from .shared import TOOL_CALL_TOKENS, FrameworkAgent


class OpenAIAgentsAgent(FrameworkAgent):
    def converse(self, game: Game, server: Server) -> None:
        with suppress(ModelBehaviorError):  # the model called a tool that does not exist, and openai-agents gave up
            asyncio.run(self._converse(game, server))

    async def _converse(self, game: Game, server: Server) -> None:
        def on_error(context: RunContextWrapper, error: Exception) -> str:
            if not isinstance(error, ModelBehaviorError):
                raise error
            game.act("")
            return game.turn

        @function_tool(failure_error_function=on_error)
        async def act(action: str) -> str:
            """Take one action in the world, and see what happens.

            Args:
                action: the action
            """
            game.act(action)
            return game.turn

        async with AsyncOpenAI(base_url=server.base_url, api_key=server.key or "none") as client:
            player = Agent(
                "player",
                instructions=game.system,
                tools=[act],
                tool_use_behavior=lambda context, results: ToolsToFinalOutputResult(game.done, final_output=""),
                model=OpenAIChatCompletionsModel(server.model, client),
                model_settings=ModelSettings(
                    max_tokens=server.max_tokens + TOOL_CALL_TOKENS, parallel_tool_calls=False
                ),
            )
            messages: list[TResponseInputItem] = [{"role": "user", "content": game.turn}]
            while not game.done:
                result = await Runner.run(player, messages, max_turns=None, run_config=RunConfig(tracing_disabled=True))
                if not game.done:  # the model answered in words: they are its action
                    game.act(result.final_output)
                    messages = [*result.to_input_list(), {"role": "user", "content": game.turn}]
