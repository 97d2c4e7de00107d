"""Agents for the tests of the whole stack: a guessing game with the openai package alone, and one for every world."""

import importlib
import json
import os
import random
import time
from dataclasses import fields
from typing import Any

import httpx
import openai

from empo2.agents.scienceworld import tasks as scienceworld
from empo2.agents.text_game.episode import TextEpisode
from empo2.agents.textworld_express import tasks as textworld_express
from empo2.agents.webshop import tasks as webshop

OWN = "empo2.agents.frameworks"
FRAMEWORKS = {
    "openai": "empo2.agents.scienceworld.agent:ScienceWorldAgent",
    "pydantic-ai": f"{OWN}.pydantic_ai:PydanticAIAgent",
    "autogen": f"{OWN}.autogen:AutogenAgent",
    "langgraph": f"{OWN}.langgraph:LangGraphAgent",
    "openai-agents": f"{OWN}.openai_agents:OpenAIAgentsAgent",
    "smolagents": f"{OWN}.smolagents:SmolagentsAgent",
}


def every_kind() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """One task of ScienceWorld for each framework and one of each other world, in the fields that AnyAgent reads."""
    form = {"actions": "choice", "choices": 6, "max_steps": 3}
    (world,), _ = scienceworld.load("find-animal", train_variations=1, test_variations=1, **form)
    rows = [_row(f"scienceworld {name}", agent, scienceworld.Episode(**world)) for name, agent in FRAMEWORKS.items()]
    (world,), _ = textworld_express.load(["coin"], train_seeds=1, test_seeds=1, **form)
    agent = "empo2.agents.textworld_express.agent:TextWorldExpressAgent"
    rows.append(_row("textworld-express openai", agent, textworld_express.Episode(**world)))
    (world,), _ = webshop.load(hits=3, train_goals=1, test_goals=1, **form)
    rows.append(_row("webshop openai", "empo2.agents.webshop.agent:WebShopAgent", webshop.Episode(**world)))
    return rows, rows[:1]


def _row(kind: str, agent: str, episode: TextEpisode) -> dict[str, str]:
    variables: dict[str, Any] = {
        f"{episode.variables}_{field.name.upper()}": str(getattr(episode, field.name)) for field in fields(episode)
    }
    return {
        "kind": kind,
        "agent": agent,
        "variables": json.dumps({**variables, f"{episode.variables}_MAX_TOKENS": "8"}),
    }


class AnyAgent:
    """The agent that AGENT names, with AGENT_VARIABLES in its environment: one run trains agents of every kind."""

    def run(self) -> None:
        os.environ.update(json.loads(os.environ["AGENT_VARIABLES"]))
        module, name = os.environ["AGENT"].split(":")
        getattr(importlib.import_module(module), name)().run()


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
