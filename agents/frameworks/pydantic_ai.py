"""pydantic-ai: one run per turn, each of which gets the messages of the earlier runs.

Each prompt extends the previous one, so an episode is one training row. After a reply without text, pydantic-ai asks
once more; a second one fails the rollout.
"""

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from empo2.agents.scienceworld.game import Game
from empo2.agents.text_game.agent import Server

from .shared import FrameworkAgent


class PydanticAIAgent(FrameworkAgent):
    def converse(self, game: Game, server: Server) -> None:
        provider = OpenAIProvider(base_url=server.base_url, api_key=server.key or "none")
        player = Agent(
            OpenAIChatModel(server.model, provider=provider),
            system_prompt=game.system,
            model_settings={"max_tokens": server.max_tokens},
        )
        history: list[ModelMessage] = []
        while not game.done:
            result = player.run_sync(game.turn, message_history=history)
            history = result.all_messages()
            game.act(result.output)
