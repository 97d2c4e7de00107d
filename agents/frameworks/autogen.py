"""autogen: an AssistantAgent, which keeps the conversation itself and gets one message per turn.

Each prompt extends the previous one, so an episode is one training row.
"""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

from empo2.agents.scienceworld.game import Game
from empo2.agents.text_game.agent import Server

from .shared import FrameworkAgent

# autogen needs a description of models that are not OpenAI's.
TEXT_ONLY = ModelInfo(
    vision=False,
    function_calling=False,
    json_output=False,
    structured_output=False,
    family=ModelFamily.UNKNOWN,
)


class AutogenAgent(FrameworkAgent):
    def converse(self, game: Game, server: Server) -> None:
        asyncio.run(self._converse(game, server))

    async def _converse(self, game: Game, server: Server) -> None:
        client = OpenAIChatCompletionClient(
            model=server.model,
            base_url=server.base_url,
            api_key=server.key or "none",
            max_tokens=server.max_tokens,
            model_info=TEXT_ONLY,
        )
        player = AssistantAgent("player", client, system_message=game.system)
        while not game.done:
            result = await player.run(task=game.turn)
            reply = result.messages[-1]
            assert isinstance(reply, TextMessage)
            game.act(reply.content)
        await client.close()
