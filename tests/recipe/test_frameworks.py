"""Agents of six frameworks at the real gateway: what they send, what they see, and the rows that they become."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from empo2.agents.scienceworld.tasks import ENV_MAP, Episode

from ..needs import need
from .harness import CHAT, TOOL_TEMPLATE, GatewayUnderTest, Played, calling, is_reflection, recorded, trained
from .model_server import Body, tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # where the players find it
from framework_player import STEPS, play_episode

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
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
type Players = Callable[[str], Executor]


@pytest.fixture(scope="module")
def players() -> Iterator[Players]:
    """A process for each agent class: to import a framework takes longer than to play with it."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))  # where a folder `agents` stands, as in a checkout
        new = multiprocessing.get_context("spawn")
        yield cache(lambda agent: stack.enter_context(ProcessPoolExecutor(1, new)))


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
    form: Any = {"simplification": "easy", "actions": "free-text", "choices": 6, "seed": 0, "max_steps": 10}
    episode = Episode(task="find-animal", variation=0, **form)
    told = {name: str(getattr(episode, path.removeprefix("input."))) for name, path in ENV_MAP.items()}
    told, process = told | gateway.variables(rollout), players(framework.agent)
    actions = await asyncio.get_running_loop().run_in_executor(process, play_episode, framework.agent, told)
    return actions, await recorded(gateway, rollout)


async def end(gateway: GatewayUnderTest) -> None:
    (await gateway.patch(gateway.rollouts[-1], "succeeded")).raise_for_status()
    assert (await gateway.drain())["empo2/reflections_failed"] == 0


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.package)
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

    mistakes = ["look", calling("act", {"act": "look"}, 1), calling("fly", {"action": "up"}, 2)]

    def reply(body: Body) -> str | Body:
        number = len(gateway.model.requests()) - 1
        return mistakes[number] if number < len(mistakes) else calling("act", {"action": f"go {number}"}, number)

    taken, _ = await play(gateway, players, framework, "no-memory", reply=reply)
    assert taken == actions
    (reward,) = await gateway.events(gateway.rollouts[-1], "reward")
    assert reward["value"] == 25 * len(actions)


def test_the_launcher_finds_openai_agents_from_the_checkout():
    """Where a folder `agents` stands, and the current folder is searched first."""
    need(OPENAI_AGENTS.package)
    code = (
        "import sys; from empo2.recipe.config import load_settings; "
        "from empo2.recipe.preflight.agent import check_agent; "
        "print(check_agent(load_settings('cpu', ['agent.class=' + sys.argv[1]])))"
    )
    command, environment = [sys.executable, "-c", code, OPENAI_AGENTS.agent], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("ScienceWorld with Java at "), done.stderr


def test_lists_change_no_package_of_a_profile():
    """So that they can be installed without their dependencies, all together or one by one."""
    folder = ROOT / "requirements"
    pins = {line for file in (folder / "frameworks").glob("*.txt") for line in file.read_text().splitlines()}
    names = {pin.partition("==")[0] for pin in pins}
    assert len(names) == len(pins), "one version of each"
    for profile in ("cpu", "gpu"):
        lines = (folder / f"{profile}.txt").read_text().splitlines()
        assert {line for line in lines if line.partition("==")[0] in names} <= pins
