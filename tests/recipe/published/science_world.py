"""agent-lightning's example science_world: the model names the number of an action."""

import os
import re

import httpx
from openai import AsyncOpenAI
from scienceworld import ScienceWorldEnv


def numbered(actions: list[dict]) -> str:
    return "\n".join(f"{number}. {action['action']}" for number, action in enumerate(actions[:50]))


class SWAgent:
    async def run(self) -> None:
        client = AsyncOpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"], max_retries=6)
        env = ScienceWorldEnv("", envStepLimit=100)
        env.load(os.environ["TASK_NAME"], int(os.environ["VARIATION_IDX"]), "easy")
        observation, info = env.reset()
        head = "You play a game of science. Reply with ### ACTION: <number> ### alone.\n\n"
        head += f"TASK: {env.get_task_description()}\n\n"
        messages: list = []
        score = float(info.get("score", 0.0))
        for _ in range(int(os.environ.get("SW_MAX_STEPS", "30"))):
            actions = env.get_valid_action_object_combinations_with_templates()
            actions = sorted(actions, key=lambda each: each["action"])  # the game gives them in any order
            text = f"OBSERVATION:\n{observation}\n\nINVENTORY:\n{env.inventory()}\n\nACTIONS:\n{numbered(actions)}"
            messages.append({"role": "user", "content": text if messages else head + text})
            completion = await client.chat.completions.create(
                model="auto", messages=messages, max_tokens=256, stop=["###\n", "###\n\n"]
            )
            said = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            found = re.fullmatch(r"###\s*ACTION:\s*(\d+)\s*###", said.strip())
            number = int(found[1]) if found else 0
            chosen = actions[number if number < min(50, len(actions)) else 0]
            observation, _, done, info = env.step(chosen["action"])
            score = float(info.get("score", score))
            if done:
                break
        httpx.post(
            os.environ["AGL_EVENT_URL"],
            json={"event_type": "reward", "data": {"value": max(0.0, min(1.0, score / 100))}},
            headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"},
            timeout=10.0,
        ).raise_for_status()
