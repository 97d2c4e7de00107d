"""smolagents' first agent: it writes Python, which is run."""

import sys

from smolagents import CodeAgent, OpenAIModel

agent = CodeAgent(tools=[], model=OpenAIModel(model_id="gpt-4o"), max_steps=4)
print(agent.run(sys.argv[1]))
