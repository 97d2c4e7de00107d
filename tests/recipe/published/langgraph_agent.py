"""langgraph's chatbot with a tool: a graph of a model and its tools."""

import sys
from typing import Annotated

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from typing_extensions import TypedDict


@tool
def search(query: str) -> str:
    """Search the web."""
    return f"nothing new on {query}"


class State(TypedDict):
    messages: Annotated[list, add_messages]


llm = ChatOpenAI(model="gpt-4o-mini").bind_tools([search])


def chatbot(state: State) -> dict:
    return {"messages": [llm.invoke(state["messages"])]}


builder = StateGraph(State)
builder.add_node("chatbot", chatbot)
builder.add_node("tools", ToolNode([search]))
builder.add_conditional_edges("chatbot", tools_condition)
builder.add_edge("tools", "chatbot")
builder.add_edge(START, "chatbot")
graph = builder.compile()
print(graph.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
