import os
import sys

from openai import OpenAI

question, answer = sys.argv[1:]
client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
messages: list = [{"role": "user", "content": f"{question} Answer with the number alone."}]
score = 0.0
for attempt in range(3):
    reply = client.chat.completions.create(
        model=os.environ.get("OPENAI_MODEL", "gpt-4o-mini"), messages=messages, max_tokens=16
    )
    text = reply.choices[0].message.content or ""
    if answer in text.split():
        score = 1.0 - 0.25 * attempt
        break
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "No. Once more."}]
print(score)
