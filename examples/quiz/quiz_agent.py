import os

import httpx
from openai import OpenAI


class QuizAgent:
    def run(self) -> None:
        client = OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"])
        messages: list = [{"role": "user", "content": os.environ["QUESTION"]}]
        reply = client.chat.completions.create(model="any", messages=messages, max_tokens=16)
        score = float(os.environ["ANSWER"] in (reply.choices[0].message.content or "").split())
        event = {"event_type": "reward", "data": {"value": score}}
        key = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
        httpx.post(os.environ["AGL_EVENT_URL"], json=event, headers=key).raise_for_status()
