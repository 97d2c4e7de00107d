"""Agents of six frameworks at the real gateway: what they send, what they see, and the rows that they become."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from empo2.agents.scienceworld.tasks import ENV_MAP, Episode

from ..needs import need
from .framework_player import STEPS
from .harness import (
    CHAT,
    TOOL_TEMPLATE,
    GatewayUnderTest,
    Played,
    calling,
    is_reflection,
    recorded,
    trained,
    worker_command,
)
from .model_server import Body, tokenizer

ROOT = Path(__file__).parents[2]
PLAYER = Path(__file__).parent / "framework_player.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
OWN = "empo2.agents.frameworks"


@dataclass(frozen=True)
class Framework:
    """An agent class, the package that it needs, whether it calls tools, and the rows that an episode becomes."""

    agent: str
    package: str
    tools: bool = False
    rows: int = 1


OPENAI_AGENTS = Framework(f"{OWN}.openai_agents:OpenAIAgentsAgent", "openai-agents", tools=True)
# It rewrites the calls of earlier turns into words of its own, so that no prompt extends the last one.
SMOLAGENTS = Framework(f"{OWN}.smolagents:SmolagentsAgent", "smolagents", tools=True, rows=STEPS)
FRAMEWORKS = [
    Framework("empo2.agents.scienceworld.agent:ScienceWorldAgent", "openai"),
    Framework(f"{OWN}.pydantic_ai:PydanticAIAgent", "pydantic-ai-slim"),
    Framework(f"{OWN}.autogen:AutogenAgent", "autogen-agentchat"),
    Framework(f"{OWN}.langgraph:LangGraphAgent", "langgraph"),
    OPENAI_AGENTS,
    SMOLAGENTS,
]
ALL = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.package)


class Players:
    """A process for each agent class: to import a framework takes longer than to play with it."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.started: dict[str, subprocess.Popen[str]] = {}

    def play(self, framework: Framework, variables: dict[str, str]) -> list[str]:
        """The actions of one episode."""
        if framework.agent not in self.started:
            with self.log.open("a") as log:
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
                command = [sys.executable, str(PLAYER), framework.agent]
                self.started[framework.agent] = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **pipes)
        process = self.started[framework.agent]
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(variables) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)


@pytest.fixture(scope="module")
def players(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Players]:
    players = Players(tmp_path_factory.mktemp("players") / "log")
    yield players
    for process in players.started.values():
        process.communicate()


def replies(gateway: GatewayUnderTest, tools: bool) -> Callable[[Body], str | Body]:
    """The model says what it does, or calls `act`, and writes its calls as TOOL_TEMPLATE does."""

    def reply(body: Body) -> str | Body:
        if is_reflection(body):
            return gateway.tip
        number = _replies(body)
        return calling("act", {"action": f"go {number}"}, number) if tools else f"go {number}"

    return reply


def _replies(body: Body) -> int:
    return sum(message["role"] == "assistant" for message in body["messages"])


def variables(gateway: GatewayUnderTest, rollout: str, **changes: int) -> dict[str, str]:
    """What agent-lightning's controller sets."""
    fixed = {"simplification": "easy", "actions": "free-text", "choices": 6, "seed": 0, "max_steps": 10}
    fields: Any = {**fixed, **changes}
    episode = Episode(task="find-animal", variation=0, **fields)
    told = {name: str(getattr(episode, path.removeprefix("input."))) for name, path in ENV_MAP.items()}
    return {**told, **gateway.variables(rollout)}


async def play(
    gateway: GatewayUnderTest,
    players: Players,
    framework: Framework,
    mode: str | None,
    update: str = "on-policy",
    reply: Callable[[Body], str | Body] | None = None,
) -> tuple[list[str], Played]:
    """The actions of an episode, and what is recorded of it."""
    gateway.model.reply = reply or replies(gateway, framework.tools)
    gateway.model.template = TOOL_TEMPLATE if framework.tools else None
    rollout = await gateway.create(mode, update)
    actions = await asyncio.to_thread(players.play, framework, variables(gateway, rollout))
    return actions, await recorded(gateway, rollout)


async def end(gateway: GatewayUnderTest) -> None:
    """End the last rollout."""
    (await gateway.patch(gateway.rollouts[-1], "succeeded")).raise_for_status()
    assert (await gateway.drain())["empo2/reflections_failed"] == 0


@ALL
async def test_an_agent_is_trained_as_it_is(gateway: GatewayUnderTest, players: Players, framework: Framework):
    """Tips are shown, and taken away again; with tools, and where the world is not written in ASCII.

    On-policy, a call fails: the framework asks again, and gets the same prompt. At the end, the chat outgrows the
    model's context, and the episode keeps the score that it has.
    """
    need(framework.package)
    actions, first = await play(gateway, players, framework, "no-memory")
    assert actions == ["go 0", "go 1", "go 2"]
    assert first.tips_shown == [0] * STEPS
    assert any("部屋には猫がいる 🐈" in tokenizer().decode(ids) for ids in first.sent)
    await end(gateway)  # leaves the tip that the others are shown
    failed: list[Body] = []

    def fault(path: str, body: Body) -> int | None:
        if path != CHAT or failed or _replies(body) == 0:
            return None
        failed.append(body)
        return 500

    gateway.model.fault = fault
    for update in ("on-policy", "off-policy"):
        gateway.model.seen.clear()
        again, played = await play(gateway, players, framework, "memory", update)
        times_sent = [seen.body["messages"] for seen in gateway.model.requests()].count(failed[0]["messages"])
        assert times_sent == (2 if update == "on-policy" else 1)
        assert again == actions
        assert played.tips_shown == [1, 1, 1]  # a chat that carries the tip is not shown it again
        assert [call["prompt_token_ids"] for call in played.calls] == played.sent
        assert played.tip_free == (first.sent if update == "off-policy" else played.sent)
        assert [(call["scope"], len(call["tip_ids"])) for call in played.calls] == [("a", 1), ("a", 0), ("a", 0)]
        (reward,) = await gateway.events(gateway.rollouts[-1], "reward")
        assert (reward["value"], reward["success"]) == (75, False)
        await end(gateway)
        prompts = first.sent if update == "off-policy" else played.sent
        whole = [prompt + reply for prompt, reply in zip(prompts, played.replies, strict=True)]
        assert (await trained(gateway, gateway.rollouts[-1]))[0] == whole[-framework.rows :]
    gateway.model.fault = lambda path, body: setattr(gateway.model, "context", 10) if _replies(body) == 1 else None
    actions, _ = await play(gateway, players, framework, "no-memory")
    assert actions == ["go 0"]
    (reward,) = await gateway.events(gateway.rollouts[-1], "reward")
    assert reward["value"] == 25
    assert reward["message"].endswith("the chat outgrew the model's context")


MISTAKES = ["look", ("act", '{"act": "look"}'), ("fly", '{"action": "up"}')]


@pytest.mark.parametrize(
    ("framework", "actions"),
    [(OPENAI_AGENTS, ["look", ""]), (SMOLAGENTS, ["go 3", "go 4", "go 5"])],
    ids=lambda value: value.package if isinstance(value, Framework) else "",
)
async def test_what_a_model_calls_wrongly_is_no_failure_of_the_rollout(
    gateway: GatewayUnderTest, players: Players, framework: Framework, actions: list[str]
):
    """Words are an action to openai-agents, and it gives up at an unknown tool; smolagents tells the model."""
    need(framework.package)

    def reply(body: Body) -> str | Body:
        number = len(gateway.model.requests()) - 1
        if number >= len(MISTAKES):
            name, arguments = "act", json.dumps({"action": f"go {number}"})
        elif isinstance(MISTAKES[number], str):
            return MISTAKES[number]
        else:
            name, arguments = MISTAKES[number]
        call = {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}

    taken, _ = await play(gateway, players, framework, "no-memory", reply=reply)
    assert taken == actions
    (reward,) = await gateway.events(gateway.rollouts[-1], "reward")
    assert reward["value"] == 25 * len(actions)


@pytest.mark.stack
async def test_the_controllers_worker_finds_openai_agents_from_the_checkout(gateway: GatewayUnderTest):
    """Where a folder `agents` stands: the worker searches the current folder first. With the real ScienceWorld."""
    need(OPENAI_AGENTS.package)
    gateway.model.reply, gateway.model.template = replies(gateway, tools=True), TOOL_TEMPLATE
    rollout = await gateway.create("memory", "off-policy")
    process = await asyncio.create_subprocess_exec(
        *worker_command(OPENAI_AGENTS.agent),
        cwd=ROOT,
        env={**ENVIRONMENT, **variables(gateway, rollout, max_steps=2)},
        stderr=subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    (reward,) = await gateway.events(rollout, "reward")
    assert reward["message"].endswith("after 2 of 2 steps")
    second = gateway.model.requests()[1].body
    assert [tool["function"]["name"] for tool in second["tools"]] == ["act"]
    assert (second["messages"][-1]["role"], second["messages"][-1]["tool_call_id"]) == ("tool", "call-0")
    assert "No known action matches that input." in second["messages"][-1]["content"]


def test_the_launcher_finds_openai_agents_from_the_checkout():
    need(OPENAI_AGENTS.package)
    code = (
        "import sys; from empo2.recipe.config import load_settings; "
        "from empo2.recipe.launcher.tasks import check_agent; "
        "print(check_agent(load_settings('cpu', ['agent.class=' + sys.argv[1]])))"
    )
    command = [sys.executable, "-c", code, OPENAI_AGENTS.agent]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.startswith("ScienceWorld with Java at "), done.stderr


def test_lists_add_to_both_profiles_and_change_nothing():
    """So that they can be installed without their dependencies, all together or one by one."""
    folder = ROOT / "requirements"
    pins: dict[str, str] = {}
    for file in (folder / "frameworks").glob("*.txt"):
        for line in file.read_text().splitlines():
            name, version = line.split("==")
            assert pins.setdefault(name, version) == version
    profiles = {profile: set((folder / f"{profile}.txt").read_text().splitlines()) for profile in ("cpu", "gpu")}
    added = {f"{name}=={version}" for name, version in pins.items()}
    assert not profiles["cpu"] & added
    assert {line for line in profiles["gpu"] if line.partition("==")[0] in pins} <= added
    overrides = [line.split()[0] for line in (folder / "overrides-frameworks.txt").read_text().splitlines()[1:]]
    assert set(overrides) <= profiles["cpu"] | profiles["gpu"] | added
