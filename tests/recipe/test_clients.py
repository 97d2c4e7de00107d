"""Agents of many frameworks, as they come: streamed, with a tool, through each dialect that their client speaks.

Ways to speak that `test_published.py` and `test_frameworks.py` play are left out.
"""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from ..needs import need
from .harness import GatewayUnderTest, calling, is_reflection, key_of, sent_again_with_tips
from .model_server import Body, tokenizer

pytestmark = [pytest.mark.rare, pytest.mark.timeout(900), pytest.mark.usefixtures("quiet", "empty_stores")]

CLIENTS = Path(__file__).parent / "clients"
# Program, package that it needs, and the ways in which it speaks.
PROGRAMS = [
    ("langchain_agent.py", "langchain-anthropic", ("messages",)),
    ("pydantic_ai_agent.py", "pydantic-ai-slim", ("messages",)),
    ("strands_agent.py", "strands-agents", ("messages",)),
    ("agno_agent.py", "agno", ("responses", "messages")),
    ("openai_and_anthropic.mjs", "node", ("chat", "responses", "messages")),
    ("vercel.mjs", "node", ("chat", "compatible", "messages")),
]


def scripted(gateway: GatewayUnderTest, body: Body) -> str | Body:
    """A call of the tool, in the template's own words, then an answer."""
    if is_reflection(body):
        return gateway.tip
    if not any(message["role"] == "assistant" for message in body["messages"]):
        return calling("look", {"place": "cellar"}, form="<tool_call>\n{}\n</tool_call>")
    return "Found it."


async def run(gateway: GatewayUnderTest, program: str, way: str, rollout: str) -> str:
    address = gateway.address(rollout)
    names = ("PATH", "HOME", "XDG_CACHE_HOME")
    environment = {
        **{name: os.environ[name] for name in names if name in os.environ},
        "OPENAI_BASE_URL": address,
        "OPENAI_API_KEY": key_of(rollout),
        "ANTHROPIC_BASE_URL": address.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key_of(rollout),
    }
    command = ["node"] if program.endswith(".mjs") else [sys.executable]
    process = await asyncio.create_subprocess_exec(
        *command,
        str(CLIENTS / program),
        way,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    return out.decode().strip()


@pytest.mark.parametrize(
    ("program", "package", "way"),
    [(program, package, way) for program, package, ways in PROGRAMS for way in ways],
    ids=lambda value: str(value).partition(".")[0],
)
async def test_an_agent_plays_as_it_is(gateway: GatewayUnderTest, program: str, package: str, way: str):
    """Its episode is one row, tips can be shown in it, and its tip-free prompts are those that it sent."""
    if package != "node":
        need(package)
    elif not (CLIENTS / "node_modules").is_dir() or shutil.which("node") is None:
        pytest.skip("needs node and its packages: npm ci --prefix tests/recipe/clients")
    gateway.model.reply = lambda body: scripted(gateway, body)
    rollout = await gateway.create("no-memory")
    assert await run(gateway, program, way, rollout) == "Found it."
    first, second = gateway.model.requests()
    row = first.prompt_ids + first.reply_ids
    assert second.prompt_ids[: len(row)] == row
    assert "a lamp in the cellar" in tokenizer().decode(second.prompt_ids[len(row) :])
    requests = await gateway.events(rollout, "model_request")
    assert [request["status"] for request in requests] == ["ok", "ok"]
    await gateway.finish(rollout)  # leaves the tip that is shown from here on
    assert (await gateway.drain())["empo2/reflections_failed"] == 0
    await sent_again_with_tips(gateway, [first, second])
