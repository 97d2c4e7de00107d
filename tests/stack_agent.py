"""Agents for the tests of the whole stack: one of every kind, and a guessing game with the openai package alone."""

import contextlib
import importlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from empo2.agents.scienceworld.agent import ScienceWorldAgent


def rollout_id() -> str:
    return os.environ["AGL_EVENT_URL"].split("/rollouts/")[1].split("/")[0]


def report(score: float) -> None:
    event = {"event_type": "reward", "data": {"value": score}}
    headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
    httpx.post(os.environ["AGL_EVENT_URL"], json=event, headers=headers, timeout=60).raise_for_status()


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
    """A guessing game. With GAME_TROUBLE=sometimes it raises in a third of the episodes."""

    def run(self) -> None:
        number = int(os.environ["GAME_NUMBER"])
        trouble = os.environ["GAME_TROUBLE"]
        draw = random.Random(rollout_id()).random()
        client = openai.OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"] or "none")
        messages: list = [{"role": "user", "content": "Guess a number between 1 and 9. Answer with the number."}]
        score = 0.0
        for _ in range(3):
            answer = client.chat.completions.create(model="any", messages=messages, max_tokens=6)
            text = answer.choices[0].message.content or ""
            if trouble == "sometimes" and draw < 0.33:
                raise RuntimeError("the game server went away")
            score += 10.0 * str(number).count("1") + sum(character.isdigit() for character in text) + draw
            reply = "Higher." if len(text) % 2 else "Lower."
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        report(score)


def paces() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Ten tasks of `PacedAgent`; the first two are slow."""
    rows = [{"name": f"task {number}", "pace": "slow" if number < 2 else "fast"} for number in range(10)]
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
        report(len(said) / 100 + random.Random(rollout_id()).random())


class TroubledAgent(PacedAgent):
    """A `PacedAgent` in whose run's second step the gateway is killed once, after one of its episodes.

    It always fails once the run has trained DOWN_AFTER steps (METRICS).
    """

    def run(self) -> None:
        metrics = Path(os.environ["METRICS"])
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if done >= int(os.environ["DOWN_AFTER"]):
            raise RuntimeError("the game server is down")
        super().run()
        if done == 1:
            with contextlib.suppress(FileExistsError):
                metrics.with_name("gateway-killed").touch(exist_ok=False)
                gateway_of_this_run().kill()


def gateway_of_this_run() -> psutil.Process:
    """The gateway that the launcher has started, a parent of this process."""
    for parent in psutil.Process().parents():
        for each in parent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # another agent, which ends meanwhile
                words = each.cmdline()
                if {"gateway", "--fd"} <= {*words} and not any("process_guard" in word for word in words):
                    return each
    raise LookupError("no parent has a gateway")
