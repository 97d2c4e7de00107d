"""Agents of five frameworks that play ScienceWorld: ordinary programs without any code for training.

To train one, set `agent.class=empo2.agents.frameworks.langgraph:LangGraphAgent`; no other setting changes. The agents
take the same variables as `empo2.agents.scienceworld.agent:ScienceWorldAgent`, which uses openai alone.

    chat, an action per reply:     pydantic_ai  autogen  langgraph
    tools, an action per call:     openai_agents  smolagents

`make frameworks` installs all of them, `make frameworks only=langgraph` one.

Tools need a model whose chat template supports them, and a vLLM server that parses its calls. verl passes its
`engine_kwargs` to vLLM's command line, so for Qwen2.5 and similar models set

    verl.actor_rollout_ref.rollout.engine_kwargs.vllm.enable_auto_tool_choice=true
    verl.actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser=hermes
"""
