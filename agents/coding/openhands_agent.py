"""OpenHands' SDK on the current folder; runs where openhands-sdk and openhands-tools are installed."""

import os
import sys

from openhands.sdk import LLM, Conversation  # pyright: ignore[reportMissingImports]
from openhands.tools.preset.default import get_default_agent  # pyright: ignore[reportMissingImports]

llm = LLM(
    model="openai/policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    usage_id="agent",
)
agent = get_default_agent(llm, cli_mode=True)
conversation = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None)
conversation.send_message(sys.argv[1])
conversation.run()
