"""langgraph: a graph in which the model (langchain-openai's ChatOpenAI) and the world take turns.

Each prompt extends the previous one, so an episode is one training row.
"""

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import SecretStr

from empo2.agents.scienceworld.game import Game
from empo2.agents.text_game.agent import Server

from .shared import FrameworkAgent


class LangGraphAgent(FrameworkAgent):
    def converse(self, game: Game, server: Server) -> None:
        chat = ChatOpenAI(
            model=server.model,
            base_url=server.base_url,
            api_key=SecretStr(server.key or "none"),
            max_completion_tokens=server.max_tokens,
        )

        def model(state: MessagesState) -> dict:
            return {"messages": [chat.invoke(state["messages"])]}

        def world(state: MessagesState) -> dict:
            game.act(state["messages"][-1].text)
            return {"messages": [HumanMessage(game.turn)]}

        graph = StateGraph(MessagesState)
        graph.add_node(model)
        graph.add_node(world)
        graph.add_edge(START, "model")
        graph.add_edge("model", "world")
        graph.add_conditional_edges("world", lambda state: END if game.done else "model")
        beginning = MessagesState(messages=[SystemMessage(game.system), HumanMessage(game.turn)])
        graph.compile().invoke(beginning, {"recursion_limit": sys.maxsize})
