"""strands' first agent, on OpenAI's model; it streams."""

import os
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def letter_counter(word: str, letter: str) -> int:
    """Count a letter in a word."""
    return word.lower().count(letter.lower())


model = OpenAIModel(client_args={"api_key": os.environ["OPENAI_API_KEY"]}, model_id="gpt-4o", params={"max_tokens": 64})
agent = Agent(model=model, tools=[letter_counter])
agent(sys.argv[1])
