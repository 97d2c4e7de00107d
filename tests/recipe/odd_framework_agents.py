"""Agents whose frameworks do what a whole, single chat does not."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.model_context import BufferedChatCompletionContext
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import SecretStr

from empo2.agents.frameworks.autogen import TEXT_ONLY
from empo2.agents.frameworks.shared import FrameworkAgent
from empo2.agents.scienceworld.game import Game
from empo2.agents.text_game.agent import Server


class Truncating(FrameworkAgent):
    """autogen, with the last two messages as its whole memory."""

    def converse(self, game: Game, server: Server) -> None:
        asyncio.run(self._converse(game, server))

    async def _converse(self, game: Game, server: Server) -> None:
        client = OpenAIChatCompletionClient(
            model=server.model, base_url=server.base_url, api_key=server.key, model_info=TEXT_ONLY
        )
        memory = BufferedChatCompletionContext(buffer_size=2)
        player = AssistantAgent("player", client, system_message=game.system, model_context=memory)
        while not game.done:
            reply = (await player.run(task=game.turn)).messages[-1]
            assert isinstance(reply, TextMessage)
            game.act(reply.content)


class Parallel(FrameworkAgent):
    """langgraph, with two nodes that ask the model at the same time, each about the same turn in its own words."""

    def converse(self, game: Game, server: Server) -> None:
        chat = ChatOpenAI(model=server.model, base_url=server.base_url, api_key=SecretStr(server.key))

        def player(state: MessagesState) -> dict:
            return {"messages": [chat.invoke([SystemMessage("You play."), *state["messages"]])]}

        def critic(state: MessagesState) -> dict:
            chat.invoke([SystemMessage("You criticise."), *state["messages"]])
            return {}

        graph = StateGraph(MessagesState)
        for node in (player, critic):
            graph.add_node(node)
            graph.add_edge(START, node.__name__)
        compiled = graph.compile()
        while not game.done:
            result = compiled.invoke(MessagesState(messages=[HumanMessage(game.turn)]))
            game.act(result["messages"][-1].text)
