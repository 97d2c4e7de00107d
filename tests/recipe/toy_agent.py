"""An ordinary agent of agent-lightning's controller: a number is to be found on a line of ten doors."""

import asyncio
import os
from pathlib import Path

import httpx

DOORS = 10
CALLS = 3


class ToyAgent:
    """Knows an OpenAI-compatible URL, an event URL and its task. ``TOY_TROUBLE`` lets it go wrong."""

    async def run(self) -> None:
        assert b"key-of-the-" not in Path("/proc/self/environ").read_bytes()  # what the controller was started with
        assert not any(name.startswith("EMPO2_") and name.endswith("KEY") for name in os.environ)
        door, trouble = int(os.environ["TOY_DOOR"]), os.environ["TOY_TROUBLE"]
        headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            messages = [{"role": "user", "content": f"One of {DOORS} doors hides a lamp. Say a number."}]
            score = 0.0
            for _ in range(CALLS):
                body = {"model": "any", "messages": messages, "max_tokens": 8}
                answer = await client.post(f"{os.environ['AGL_OPENAI_BASE_URL']}/chat/completions", json=body)
                said = answer.raise_for_status().json()["choices"][0]["message"]["content"]
                digits = [int(word) for word in said.split() if word.isdigit()]
                guess = digits[0] if digits else 0
                score = max(score, 1 - abs(guess - door) / DOORS)
                seen = f"Behind door {guess} you see {'the lamp' if guess == door else 'nothing'}. Say a number."
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": seen}]
                if trouble == "raise":
                    raise RuntimeError("the doors are stuck")
                if trouble == "hang":
                    await asyncio.sleep(1000)
            if trouble != "no reward":
                event = {"event_type": "reward", "data": {"value": score}}
                (await client.post(os.environ["AGL_EVENT_URL"], json=event)).raise_for_status()
