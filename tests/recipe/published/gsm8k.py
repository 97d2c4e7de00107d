"""agent-lightning's example gsm8k: one question, one call."""

import os
import re

import httpx
from openai import AsyncOpenAI


class ChatAgent:
    async def run(self) -> None:
        client = AsyncOpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"], max_retries=6)
        question = f"{os.environ['QUESTION']}\n\nThink first. End with the answer between sharps: ### ANSWER: 42 ###"
        reply = await client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": question}], temperature=1.0, max_tokens=1024
        )
        found = re.search(r"###\s*ANSWER:\s*(.+?)\s*###", reply.choices[0].message.content or "")
        right = found is not None and found[1] == os.environ["ANSWER"]
        httpx.post(
            os.environ["AGL_EVENT_URL"],
            json={"event_type": "reward", "data": {"value": float(right)}},
            headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"},
            timeout=10.0,
        ).raise_for_status()
