"""Tasks that train agents of every kind in one run, in the fields that `AnyAgent` of stack_agent.py reads."""

import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from empo2.agents.alfworld import tasks as alfworld
from empo2.agents.houses import tasks as houses
from empo2.agents.scienceworld import tasks as scienceworld
from empo2.agents.text_game.episode import TextEpisode
from empo2.agents.textworld_express import tasks as textworld_express
from empo2.agents.webshop import tasks as webshop

from .recipe.published_agents import Published

QUIZ = Path(__file__).parents[1] / "examples" / "quiz" / "quiz.py"
COMMAND = "empo2.agents.command:CommandAgent"
OPENAI = "empo2.agents.scienceworld.agent:ScienceWorldAgent"
OWN = "empo2.agents.frameworks"
FRAMEWORKS = {
    "pydantic-ai": f"{OWN}.pydantic_ai:PydanticAIAgent",
    "autogen": f"{OWN}.autogen:AutogenAgent",
    "langgraph": f"{OWN}.langgraph:LangGraphAgent",
    "openai-agents": f"{OWN}.openai_agents:OpenAIAgentsAgent",
    "smolagents": f"{OWN}.smolagents:SmolagentsAgent",
}
FORM: dict[str, Any] = {"actions": "choice", "choices": 6, "max_steps": 3}

Task = dict[str, str]


def of_worlds() -> list[Task]:
    """Each world, and a command."""
    (express,), _ = textworld_express.load(["coin"], train_seeds=1, test_seeds=1, **FORM)
    (shop,), _ = webshop.load(hits=3, train_goals=1, test_goals=1, **FORM)
    (house,), _ = houses.coin_collector("easy", train_houses=1, unseen_houses=1, **FORM)
    (game,), _ = alfworld.load(tasks=["look_at_obj_in_light"], train_games=1, test_games=1, **FORM)
    line = f"{shlex.quote(sys.executable)} {shlex.quote(str(QUIZ))} {{QUESTION}} {{ANSWER}}"
    quiz = {"AGENT_COMMAND": line, "AGENT_REWARD": "stdout", "QUESTION": "What is 1 + 1?", "ANSWER": "2"}
    agents = "empo2.agents"
    return [
        _episode("scienceworld", "openai", OPENAI, *_scienceworld()),
        _episode(
            "textworld-express",
            "openai",
            f"{agents}.textworld_express.agent:TextWorldExpressAgent",
            textworld_express.Episode(**express),
        ),
        _episode("webshop", "openai", f"{agents}.webshop.agent:WebShopAgent", webshop.Episode(**shop)),
        _episode("coin", "openai", f"{agents}.houses.agent:CoinCollectorAgent", houses.CoinCollectorEpisode(**house)),
        _episode("alfworld", "openai", f"{agents}.alfworld.agent:ALFWorldAgent", alfworld.Episode(**game)),
        _task("questions", "quiz command", COMMAND, quiz),
    ]


def of_frameworks() -> list[Task]:
    """ScienceWorld, played in each framework, and with free text."""
    played = [_episode("scienceworld", name, agent, *_scienceworld()) for name, agent in FRAMEWORKS.items()]
    return [*played, _episode("scienceworld", "free text", OPENAI, *_scienceworld(actions="free-text"))]


def with_tips() -> Task:
    """A house in the scope of `of_worlds`, whose tips it finds."""
    (house,), _ = houses.coin_collector("easy", train_houses=1, unseen_houses=1, **FORM)
    agent = "empo2.agents.houses.agent:CoinCollectorAgent"
    return _episode("coin", "openai with tips", agent, houses.CoinCollectorEpisode(**house))


def of_published(agent: Published) -> Task:
    """A published agent, whose program lies in the current folder."""
    values = {name: agent.task.get(value.removeprefix("input."), value) for name, value in agent.env.items()}
    return _task("questions", agent.name, COMMAND, {"AGENT_COMMAND": agent.line, **values})


def for_validation(tasks: int, steps: int) -> list[Task]:
    """Longer episodes of ScienceWorld."""
    episodes = _scienceworld(tasks, max_steps=steps)
    return [_episode("scienceworld", "openai", OPENAI, episode, max_tokens=2) for episode in episodes]


def _scienceworld(episodes: int = 1, **changes: Any) -> list[scienceworld.Episode]:
    rows, _ = scienceworld.load("find-animal", train_variations=episodes, test_variations=1, **{**FORM, **changes})
    return [scienceworld.Episode(**row) for row in rows]


def _episode(world: str, framework: str, agent: str, episode: TextEpisode, *, max_tokens: int = 8) -> Task:
    variables = {
        f"{episode.variables}_{field.name.upper()}": str(getattr(episode, field.name)) for field in fields(episode)
    }
    variables[f"{episode.variables}_MAX_TOKENS"] = str(max_tokens)
    return _task(world, f"{world} {framework}", agent, variables)


def _task(world: str, kind: str, agent: str, variables: dict[str, str]) -> Task:
    return {"world": world, "kind": kind, "agent": agent, "variables": json.dumps(variables)}
