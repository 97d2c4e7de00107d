"""Published agents, through `empo2 init` and the real gateway, held against docs/agents.md; clients of frameworks."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from empo2.recipe.cli import main
from empo2.recipe.config import load_settings
from empo2.recipe.files.tasks import agent_variables, load_tasks
from empo2.recipe.retrofit.scripted_model import Script

from ..needs import need
from .harness import (
    ROOMS,
    GatewayUnderTest,
    calling,
    is_reflection,
    key_of,
    running_gateway,
    sent_again_with_tips,
    trained,
)
from .model_server import MODEL, Body, ModelServer, serving, tokenizer
from .published_agents import PUBLISHED, Published, need_node, table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet", "empty_stores")]


def script(agent: Published) -> Callable[[Body], str | Body]:
    """What the scripted model of `empo2 init` says; its tool calls are written as SmolLM2's chat template has them."""
    script = Script(agent.replies)

    def reply(body: Body) -> str | Body:
        if is_reflection(body):
            return "Take the lamp first."
        message = script.choice(body)["message"]
        if "tool_calls" not in message:
            return message["content"]
        (function,) = (call["function"] for call in message["tool_calls"])
        written = json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
        return {**message, "written": f"<tool_call>\n{written}\n</tool_call>"}

    return reply


@pytest.fixture
def search_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    app = FastAPI()
    document = {"document": {"contents": "The lamp is in the cellar."}}
    app.add_api_route("/retrieve", lambda: {"result": [[document]]}, methods=["POST"])
    with serving(app) as url:
        monkeypatch.setenv("SEARCH_R1_RETRIEVAL_URL", f"{url}/retrieve")
        yield


@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    "agent",
    [pytest.param(each, marks=[pytest.mark.rare] * each.has_own_agent, id=each.program) for each in PUBLISHED],
)
@pytest.mark.usefixtures("search_engine")
async def test_a_published_agent(agent: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    """`empo2 init` plays it; what it sent then goes through the gateway with tips, as an off-policy rollout."""
    agent.need()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    agent.put_into(tmp_path)
    model = ModelServer(reply=script(agent))
    with model.serve():
        code = main([*agent.init, "--model", MODEL, "--server", model.url, "--time-limit", "280"])
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    sent = model.requests()
    (reward,) = re.findall(r"the reward was reported: (.*)", printed.out)
    settings = load_settings(file=Path("empo2.yaml"))
    assert load_tasks(settings).train[0] == agent.task
    assert agent_variables(agent.task, settings.agent.env)

    async with running_gateway(tmp_path, "memory.min_similarity=-1", model=model) as gateway:
        await gateway.store_tips(ROOMS, gateway.tip)
        model.reply = script(agent)
        rollout = await sent_again_with_tips(gateway, sent)
        await gateway.finish(rollout, float(reward))
        assert (await gateway.drain())["empo2/reflections_failed"] == 0
        rows, *_ = await trained(gateway, rollout, limit=8192)
    whole = [seen.prompt_ids + seen.reply_ids for seen in sent]
    assert rows == [ids for ids, after in zip(whole, [*whole[1:], []], strict=True) if after[: len(ids)] != ids]

    row = table()[agent.name]
    assert (row.lines_changed, row.training_rows) == (len(agent.changes), len(rows))
    findings = re.findall(r"^(ok|note) +(.*)", printed.out, re.MULTILINE)
    for words in row.said:
        assert any(words in line for _, line in findings), (words, findings)
    for level, line in findings:
        assert level == "ok" or any(words in line for words in row.said), line


def test_the_table_has_twenty_agents():
    assert list(table()) == [agent.name for agent in PUBLISHED] and len(PUBLISHED) == 20


# Streamed, with a tool, in ways to speak that no other test plays: program, package that it needs, and these ways.
CLIENTS = [
    ("langchain_agent.py", "langchain-anthropic", ("messages",)),
    ("pydantic_ai_agent.py", "pydantic-ai-slim", ("messages",)),
    ("strands_agent.py", "strands-agents", ("messages",)),
    ("agno_agent.py", "agno", ("responses", "messages")),
    ("openai_and_anthropic.mjs", "node", ("chat", "responses", "messages")),
    ("vercel.mjs", "node", ("chat", "compatible", "messages")),
]


@pytest.mark.rare
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("program", "package", "way"),
    [(program, package, way) for program, package, ways in CLIENTS for way in ways],
    ids=lambda value: str(value).partition(".")[0],
)
async def test_a_client_plays_as_it_is(gateway: GatewayUnderTest, program: str, package: str, way: str):
    """Its episode is one row, tips can be shown in it, and its tip-free prompts are those that it sent."""
    need_node() if package == "node" else need(package)

    def reply(body: Body) -> str | Body:
        if is_reflection(body):
            return gateway.tip
        called = any(message["role"] == "assistant" for message in body["messages"])
        return "Found it." if called else calling("look", {"place": "cellar"}, form="<tool_call>\n{}\n</tool_call>")

    gateway.model.reply = reply
    rollout = await gateway.create("no-memory")
    address, key = gateway.address(rollout), key_of(rollout)
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME") if name in os.environ}
    environment |= {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": key}
    environment |= {"ANTHROPIC_BASE_URL": address.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    command = ["node" if package == "node" else sys.executable, str(Path(__file__).parent / "clients" / program), way]
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "Found it."), done.stderr
    first, second = gateway.model.requests()
    row = first.prompt_ids + first.reply_ids
    assert second.prompt_ids[: len(row)] == row
    assert "a lamp in the cellar" in tokenizer().decode(second.prompt_ids[len(row) :])
    requests = await gateway.events(rollout, "model_request")
    assert [request["status"] for request in requests] == ["ok", "ok"]
    await gateway.finish(rollout)  # leaves the tip that is shown from here on
    assert (await gateway.drain())["empo2/reflections_failed"] == 0
    await sent_again_with_tips(gateway, [first, second])
