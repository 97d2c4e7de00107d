"""Agents for the tests of the whole stack: one of every kind, and a guessing game with the openai package alone."""

import importlib
import json
import os
import random
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import openai

from empo2.agents.scienceworld import tasks as scienceworld
from empo2.agents.scienceworld.agent import ScienceWorldAgent
from empo2.agents.text_game.episode import TextEpisode
from empo2.agents.textworld_express import tasks as textworld_express
from empo2.agents.webshop import tasks as webshop

QUIZ = Path(__file__).parents[1] / "examples" / "quiz" / "quiz.py"
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
    """ScienceWorld for each framework, each other world, and a command, in the fields that AnyAgent reads."""
    form = {"actions": "choice", "choices": 6, "max_steps": 3}
    (world,), _ = scienceworld.load("find-animal", train_variations=1, test_variations=1, **form)
    rows = [_row("scienceworld", name, agent, scienceworld.Episode(**world)) for name, agent in FRAMEWORKS.items()]
    (world,), _ = textworld_express.load(["coin"], train_seeds=1, test_seeds=1, **form)
    agent = "empo2.agents.textworld_express.agent:TextWorldExpressAgent"
    rows.append(_row("textworld-express", "openai", agent, textworld_express.Episode(**world)))
    (world,), _ = webshop.load(hits=3, train_goals=1, test_goals=1, **form)
    rows.append(_row("webshop", "openai", "empo2.agents.webshop.agent:WebShopAgent", webshop.Episode(**world)))
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(QUIZ))} {{QUESTION}} {{ANSWER}}"
    variables = {"AGENT_COMMAND": command, "AGENT_REWARD": "stdout", "QUESTION": "What is 1 + 1?", "ANSWER": "2"}
    agent = "empo2.agents.command:CommandAgent"
    rows.append({"world": "quiz", "kind": "quiz command", "agent": agent, "variables": json.dumps(variables)})
    return rows, rows[:2]


def _row(world: str, framework: str, agent: str, episode: TextEpisode) -> dict[str, str]:
    variables: dict[str, Any] = {
        f"{episode.variables}_{field.name.upper()}": str(getattr(episode, field.name)) for field in fields(episode)
    }
    return {
        "world": world,
        "kind": f"{world} {framework}",
        "agent": agent,
        "variables": json.dumps({**variables, f"{episode.variables}_MAX_TOKENS": "8"}),
    }


def rollout_id() -> str:
    return os.environ["AGL_EVENT_URL"].split("/rollouts/")[1].split("/")[0]


class AnyAgent:
    """The agent that AGENT names, with AGENT_VARIABLES in its environment: one run trains agents of every kind.

    Each episode that ends well is a line of the file that PLAYED names: the rollout's id, then KIND.
    """

    check = staticmethod(ScienceWorldAgent.check)

    def run(self) -> None:
        os.environ.update(json.loads(os.environ["AGENT_VARIABLES"]))
        module, name = os.environ["AGENT"].split(":")
        getattr(importlib.import_module(module), name)().run()
        with open(os.environ["PLAYED"], "a") as file:
            file.write(f"{rollout_id()} {os.environ['KIND']}\n")


class GuessingAgent:
    """A guessing game. GAME_TROUBLE: "sometimes" raises in a fifth of the episodes, "always" in all."""

    def run(self) -> None:
        number = int(os.environ["GAME_NUMBER"])
        trouble = os.environ["GAME_TROUBLE"]
        draw = random.Random(rollout_id()).random()
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
            score += 10.0 * str(number).count("1") + sum(character.isdigit() for character in text) + draw
            reply = "Higher." if len(text) % 2 else "Lower."
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        event = {"event_type": "reward", "data": {"value": score}}
        headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
        httpx.post(os.environ["AGL_EVENT_URL"], json=event, headers=headers).raise_for_status()


def paces() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Eight tasks of `PacedAgent`; the first two are slow."""
    rows = [{"name": f"task {number}", "pace": "slow" if number < 2 else "fast"} for number in range(8)]
    return rows, rows[-1:]


class PacedAgent:
    """Three turns. With PACE=slow the first one is of the run's first step and the others of a later one (METRICS)."""

    def run(self) -> None:
        client = openai.OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"])
        messages: list[Any] = []
        said = ""
        for text in ("A dark room. What do you do?", "Nothing happens. What now?", "A door opens. And now?"):
            messages.append({"role": "user", "content": f"{os.environ['NAME']}: {text}"})
            answer = client.chat.completions.create(model="any", messages=messages, max_tokens=8)
            reply = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": reply})
            said += reply
            while os.environ["PACE"] == "slow" and not os.path.exists(os.environ["METRICS"]):
                time.sleep(0.2)
        score = len(said) / 100 + random.Random(rollout_id()).random()
        headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
        event = {"event_type": "reward", "data": {"value": score}}
        httpx.post(os.environ["AGL_EVENT_URL"], json=event, headers=headers).raise_for_status()
