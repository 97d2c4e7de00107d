"""reasoning-gym's README: a generated question, and the data set's own judge."""

import sys

import reasoning_gym
from openai import OpenAI

data = reasoning_gym.create_dataset("leg_counting", size=10, seed=42)
entry = data[int(sys.argv[1])]
reply = OpenAI().chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": entry["question"]}])
print(data.score_answer(answer=reply.choices[0].message.content, entry=entry))
