"""A small agent for the tests of the whole stack: three turns of a guessing game, with the openai package alone."""

import os
import random
import time

import httpx
import openai


class GuessingAgent:
    """Plays one episode. GAME_TROUBLE: every n-th episode raises, or all do; one may hang."""

    def run(self) -> None:
        number = int(os.environ["GAME_NUMBER"])
        trouble = os.environ["GAME_TROUBLE"]
        rollout = os.environ["AGL_EVENT_URL"].split("/rollouts/")[1].split("/")[0]
        draw = random.Random(rollout).random()
        if trouble == "always":
            raise RuntimeError("the game server is down")
        client = openai.OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"] or "none")
        messages: list = [{"role": "user", "content": "Guess a number between 1 and 9. Answer with the number."}]
        score = 0.0
        for _ in range(3):
            answer = client.chat.completions.create(model="any", messages=messages, max_tokens=6)
            text = answer.choices[0].message.content or ""
            if trouble == "sometimes" and draw < 0.2:
                raise RuntimeError("the game server went away")
            if trouble == "hang" and draw < 0.2:
                time.sleep(1000)
            score += 10.0 * str(number).count("1") + sum(character.isdigit() for character in text) + draw
            reply = "Higher." if len(text) % 2 else "Lower."
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        event = {"event_type": "reward", "data": {"value": score}}
        headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
        httpx.post(os.environ["AGL_EVENT_URL"], json=event, headers=headers).raise_for_status()
