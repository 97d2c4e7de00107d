"""smolagents: a ToolCallingAgent with the environment's step as its only tool.

Its turns never merge into one training row: smolagents rewrites each call of the model ("Calling tools: ..."), and
puts each tool result into a user message. Every turn is a correct row of its own.
"""

from smolagents import ActionStep, AgentToolExecutionError, LogLevel, OpenAIModel, ToolCallingAgent, tool

from empo2.agents.scienceworld.game import Game
from empo2.agents.text_game.agent import Server

from .shared import TOOL_CALL_TOKENS, FrameworkAgent


class SmolagentsAgent(FrameworkAgent):
    def converse(self, game: Game, server: Server) -> None:
        @tool
        def act(action: str) -> str:
            """Take one action in the world, and see what happens.

            Args:
                action: the action
            """
            game.act(action)
            return game.turn

        model = OpenAIModel(
            server.model,
            api_base=server.base_url,
            api_key=server.key or "none",
            max_tokens=server.max_tokens + TOOL_CALL_TOKENS,
            tool_choice="auto",  # "required", its default, samples from another distribution than the trained one
        )
        player = ToolCallingAgent([act], model, max_tool_threads=1, verbosity_level=LogLevel.OFF)
        del player.tools["final_answer"]
        player.prompt_templates["system_prompt"] = game.system
        steps = player.run(game.turn, max_steps=game.episode.max_steps, stream=True)
        for step in steps:  # pyright: ignore[reportGeneralTypeIssues] (run's type is that of stream=False)
            if isinstance(step, ActionStep):
                error = step.error
                if isinstance(error, AgentToolExecutionError) and error.__cause__:
                    raise error.__cause__  # of the environment; smolagents reports the model's own errors to it
                if step.step_number == game.episode.max_steps:
                    break  # otherwise smolagents would ask for a summary
            if game.done:
                break
