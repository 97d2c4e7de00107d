"""agent-lightning's example search_r1: the model searches with tags in its text, and answers with another tag."""

import json
import os
import re

import httpx
from openai import AsyncOpenAI

HEAD = (
    "Think inside <think> and </think>. To look something up, write <search> what </search>; what is found comes "
    "between <information> and </information>. Answer inside <answer> and </answer>. Question: "
)


async def found_for(query: str) -> str:
    async with httpx.AsyncClient(timeout=30.0) as client:
        asked = {"queries": [query], "topk": 3, "return_scores": True}
        address = os.environ.get("SEARCH_R1_RETRIEVAL_URL", "http://127.0.0.1:8000/retrieve")
        answer = await client.post(address, json=asked)
        answer.raise_for_status()
    documents = [item["document"]["contents"] for item in answer.json()["result"][0]]
    return "".join(f"Doc {number}: {text}\n" for number, text in enumerate(documents, 1))


class SearchR1Agent:
    async def run(self) -> None:
        client = AsyncOpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"], max_retries=6)
        messages: list = [{"role": "user", "content": HEAD + os.environ["QUESTION"]}]
        answers, right = json.loads(os.environ["GOLDEN_ANSWERS"]), False
        for _ in range(4):
            reply = await client.chat.completions.create(
                model="auto", messages=messages, temperature=1.0, max_tokens=500
            )
            said = reply.choices[0].message.content or ""
            for tag in ("</search>", "</answer>"):
                if tag in said:
                    said = said.split(tag)[0] + tag
                    break
            messages.append({"role": "assistant", "content": said})
            action = re.search(r"<(search|answer)>(.*?)</\1>", said, re.DOTALL)
            if action is None or action[1] == "answer":
                right = action is not None and action[2].strip().lower() in [answer.lower() for answer in answers]
                break
            information = await found_for(action[2].strip())
            messages.append({"role": "user", "content": f"\n\n<information>{information}</information>\n\n"})
        async with httpx.AsyncClient(timeout=10.0) as events:
            answer = await events.post(
                os.environ["AGL_EVENT_URL"],
                json={"event_type": "reward", "data": {"value": float(right), "source": "agent"}},
                headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"},
            )
            answer.raise_for_status()
