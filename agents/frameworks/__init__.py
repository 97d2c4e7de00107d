"""ScienceWorld played by agents of five frameworks: ordinary programs that know nothing of training.

`agent.class=empo2.agents.frameworks.langgraph:LangGraphAgent` is all that changes in a training run's settings; the
agents take the same variables as `empo2.agents.scienceworld.agent:ScienceWorldAgent`, which uses openai alone.

    chat, an action per reply:     pydantic_ai  autogen  langgraph
    tools, an action per call:     openai_agents  smolagents

`make frameworks` installs them all, `make frameworks only=langgraph` one.

Tools need a model whose chat template has them, and a vLLM that reads its calls. verl hands its `engine_kwargs` to
vLLM's own command line, so that Qwen2.5 and its like are set up by

    verl.actor_rollout_ref.rollout.engine_kwargs.vllm.enable_auto_tool_choice=true
    verl.actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser=hermes
"""
