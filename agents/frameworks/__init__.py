"""Agents of five frameworks that play ScienceWorld: ordinary programs without any code for training.

To train one, set `agent.class=empo2.agents.frameworks.langgraph:LangGraphAgent`; no other setting changes. The agents
take the same variables as `empo2.agents.scienceworld.agent:ScienceWorldAgent`, which uses openai alone.

    chat, an action per reply:     pydantic_ai  autogen  langgraph
    tools, an action per call:     openai_agents  smolagents

`make frameworks` installs all of them, `make frameworks only=langgraph` one.

Tools need a model whose chat template has them, and whose calls vLLM can parse (`model.tool_parser`).
"""
