"""An agent in LangGraph that is played in a test by the real controller, with spans of its own around run and nodes."""

import os
from typing import Any

import httpx
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from pydantic import SecretStr

from empo2.agents.rollout import Rollout

ROOMS = ("a dark room with a lamp", "the lamp is lit")


def carry(request: httpx.Request) -> None:
    propagate.inject(request.headers)


class TracedAgent:
    def run(self) -> None:
        rollout = Rollout.from_env(os.environ)
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # the controller names the collector
        tracer = provider.get_tracer("graph")
        client = httpx.Client(event_hooks={"request": [carry]})
        chat: Any = ChatOpenAI(
            model="policy", base_url=rollout.base_url, api_key=SecretStr(rollout.key), http_client=client
        )
        rooms = iter(ROOMS[1:])

        def model(state: MessagesState) -> dict[str, Any]:
            with tracer.start_as_current_span("model"):
                return {"messages": [chat.invoke(state["messages"])]}

        def world(state: MessagesState) -> dict[str, Any]:
            with tracer.start_as_current_span("world"):
                return {"messages": [HumanMessage(next(rooms))]}

        graph = StateGraph(MessagesState)
        graph.add_node(model)
        graph.add_node(world)
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", lambda state: "world" if len(state["messages"]) < 2 * len(ROOMS) else END)
        graph.add_edge("world", "model")
        parent = propagate.extract({"traceparent": os.environ["TRACEPARENT"]})
        with tracer.start_as_current_span("graph", parent):
            graph.compile().invoke(MessagesState(messages=[HumanMessage(ROOMS[0])]))
        rollout.report(2.0)
        provider.shutdown()
