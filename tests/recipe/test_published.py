"""Twenty published agents, each through `empo2 init` and the real gateway, held against the table of docs/agents.md."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from fastapi import FastAPI

from empo2.recipe.cli import main
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.tasks import load_tasks
from empo2.recipe.retrofit.recorder import agent_variables
from empo2.recipe.retrofit.scripted_model import answer_choice

from .harness import ROOMS, is_reflection, running_gateway, sent_again_with_tips, trained
from .model_server import MODEL, Body, ModelServer, serving
from .published_agents import PUBLISHED, Published, Row, table

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


@pytest.mark.timeout(2 * SECONDS)
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
        code = main([*agent.init, "--model", MODEL, "--server", model.url, "--time-limit", str(SECONDS)])
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

    findings = re.findall(r"^(ok|note) +(.*)", printed.out, re.MULTILINE)
    assert table()[agent.name] == Row(
        agent.lines_changed(), len(rows), said(agent, findings), table()[agent.name].trained
    )


def said(agent: Published, findings: list[tuple[str, str]]) -> tuple[str, ...]:
    """The table's words, if each is of one of init's findings, and each note has its words; else the findings."""
    words = table()[agent.name].said
    lines = [line for _, line in findings]
    missing = [line for level, line in findings if level == "note" and not any(word in line for word in words)]
    return words if all(any(word in line for line in lines) for word in words) and not missing else tuple(lines)


def test_the_table_has_each_agent_once():
    assert list(table()) == [agent.name for agent in PUBLISHED]
    assert len(table()) == 20
