"""Twenty published agents, each through `empo2 init` and the real gateway, held against the table of docs/agents.md."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from fastapi import FastAPI

from empo2.recipe.cli import main
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.tasks import load_tasks
from empo2.recipe.retrofit.agent_worker import agent_variables, worker_command
from empo2.recipe.retrofit.scripted_model import answer_choice

from .harness import AGENT_KEY, BLOCK, ROOMS, GatewayUnderTest, is_reflection, prompt_ids, running_gateway
from .model_server import MODEL, Body, ModelServer, serving, tokenizer
from .published_agents import PUBLISHED, Published, Row, table
from .test_dialects import address_of
from .test_frameworks import rows

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

SECONDS = 280


def script(agent: Published) -> Callable[[Body], str | Body]:
    """What the scripted model of `empo2 init` says; its tool calls are written as SmolLM2's chat template has them."""
    texts = chain(agent.replies, repeat(agent.replies[-1]))

    def reply(body: Body) -> str | Body:
        if is_reflection(body):
            return "Take the lamp first."
        message = answer_choice(body, texts)["message"]
        if "tool_calls" not in message:
            return message["content"]
        (function,) = (call["function"] for call in message["tool_calls"])
        written = json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
        return {**message, "written": f"<tool_call>\n{written}\n</tool_call>"}

    return reply


@pytest.fixture
def search_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What agent-lightning's example search_r1 asks."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(asked: Body) -> Body:
        return {
            "result": [[{"document": {"contents": f"The {query} is in the cellar."}}] for query in asked["queries"]]
        }

    with serving(app) as url:
        monkeypatch.setenv("SEARCH_R1_RETRIEVAL_URL", f"{url}/retrieve")
        yield


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("agent", PUBLISHED, ids=lambda agent: agent.program)
@pytest.mark.usefixtures("search_engine")
async def test_a_published_agent(agent: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    """First as `empo2 init` plays it, without tips; then with tips, as an off-policy rollout, from init's own file."""
    agent.need()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    agent.put_into(tmp_path)
    model = ModelServer(reply=script(agent))
    with model.serve():
        code = main([*agent.init, "--model", MODEL, "--server", model.url, "--time-limit", str(SECONDS)])
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    without_tips = [(seen.prompt_ids, seen.reply_ids) for seen in model.requests()]
    (reward,) = re.findall(r"the reward was reported: (.*)", printed.out)

    async with running_gateway(tmp_path, "memory.min_similarity=-1", model=model) as gateway:
        await gateway.store_tips(ROOMS, gateway.tip)
        model.reply = script(agent)
        rollout = await gateway.create("memory", "off-policy")
        await play(gateway, rollout)
        await gateway.client.post(f"/empo2/rollouts/{rollout}/settle")
        sent = [prompt_ids(event) for event in await gateway.events(rollout, "model_request")]
        calls = await gateway.events(rollout, "empo2_call")
        assert [event["value"] for event in await gateway.events(rollout, "reward")] == [float(reward)]
        await gateway.patch(rollout, "succeeded")
        assert (await gateway.drain())["empo2/reflections_failed"] == 0
        trained = await rows(gateway, rollout, limit=8192)
    assert [tokenizer().decode(ids).count(BLOCK) for ids in sent] == [1] * len(without_tips)
    assert [call["tip_free_prompt_token_ids"] for call in calls] == [prompt for prompt, _ in without_tips]
    whole = [prompt + reply for prompt, reply in without_tips]
    assert trained == [ids for ids, after in zip(whole, [*whole[1:], []], strict=True) if after[: len(ids)] != ids]

    findings = re.findall(r"^(ok|note) +(.*)", printed.out, re.MULTILINE)
    assert table()[agent.name] == Row(
        agent.lines_changed(), len(trained), said(agent, findings), table()[agent.name].trained
    )


def said(agent: Published, findings: list[tuple[str, str]]) -> tuple[str, ...]:
    """The table's words, if each is of one of init's findings, and each note has its words; else the findings."""
    words = table()[agent.name].said
    lines = [line for _, line in findings]
    missing = [line for level, line in findings if level == "note" and not any(word in line for word in words)]
    return words if all(any(word in line for line in lines) for word in words) and not missing else tuple(lines)


async def play(gateway: GatewayUnderTest, rollout: str) -> None:
    """Run the agent of `empo2.yaml`, as agent-lightning's controller does."""
    settings = load_settings(file=Path("empo2.yaml"))
    task = load_tasks(settings).train[0]
    variables = {
        **agent_variables(task, settings.agent.env),
        "AGL_OPENAI_BASE_URL": address_of(gateway, rollout),
        "AGL_EVENT_URL": f"{str(gateway.client.base_url).rstrip('/')}/api/rollouts/{rollout}/attempt/0/events",
        "AGL_KEY": AGENT_KEY,
    }
    process = await asyncio.create_subprocess_exec(
        *worker_command(settings.agent.name),
        env={**os.environ, **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0, output.decode()[-3000:]


def test_the_table_has_each_agent_once():
    assert list(table()) == [agent.name for agent in PUBLISHED]
    assert len(table()) == 20
