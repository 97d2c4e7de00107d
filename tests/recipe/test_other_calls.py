"""Calls that are not trained: chosen by path, header, model or a function, passed on as they are, and counted."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.gateway.stages.untrained import choice_of

from .harness import AGENT_KEY, GatewayUnderTest, running_gateway, until, user
from .model_server import serving

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


Sent = list[tuple[str, dict[str, str], bytes]]


@asynccontextmanager
async def gateway_and_other(folder: Path, *settings: str) -> AsyncIterator[tuple[GatewayUnderTest, Sent]]:
    sent, app = Sent(), FastAPI()

    @app.post("/v1/{path:path}")
    async def answer(path: str, request: Request) -> StreamingResponse:
        sent.append((path, dict(request.headers), await request.body()))
        chunks = iter([b"data: {}\n\n", b"data: [DONE]\n\n"])
        return StreamingResponse(chunks, 201, {"retry-after": "7"}, media_type="text/event-stream")

    with serving(app) as url:
        async with running_gateway(folder, *settings, f"gateway.other_server={url}/v1") as gateway:
            yield gateway, sent


JUDGED = (
    b'{"model":"judge-1",  "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": '
    b'[{"id": "1", "type": "custom", "custom": {"name": "a", "input": "b"}}]}], "seed": 1.50}'
)
PLAYED = b'{"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}'


async def test_what_is_not_chosen_passes_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-judges-key")
    async with gateway_and_other(tmp_path, "gateway.trained_calls=[{model: pol*}]") as (gateway, sent):
        rollout = await gateway.create("memory", "off-policy")
        async with gateway.as_agent() as client:
            address = gateway.address(rollout)
            own = {"x-mine": "1", "api-key": AGENT_KEY}
            answer = await client.post(f"{address}/chat/completions", content=JUDGED, headers=own)
            assert (answer.status_code, answer.text) == (201, "data: {}\n\ndata: [DONE]\n\n")
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["retry-after"] == "7"
            assert (await client.post(f"{address}/v1/messages", content=JUDGED)).status_code == 201
            assert (await client.post(f"{address}/embeddings", content=b'{"input": "x"}')).status_code == 201
            assert gateway.model.seen == []
            assert (await client.post(f"{address}/chat/completions", content=PLAYED)).status_code == 200
        paths, bodies = ["chat/completions", "messages", "embeddings"], [JUDGED, JUDGED, b'{"input": "x"}']
        assert [(path, body) for path, _, body in sent] == [*zip(paths, bodies, strict=True)]
        assert {headers["authorization"] for _, headers, _ in sent} == {"Bearer the-judges-key"}
        assert AGENT_KEY not in str(sent)
        assert sent[0][1]["x-mine"] == "1"
        # No trace of them: the trained call is the only event, turn and visit.
        assert len(await gateway.calls(rollout)) == len(await gateway.events(rollout, "model_request")) == 1
        metrics = await gateway.drain()
        assert (metrics["empo2/calls"], metrics["empo2/untrained_calls"]) == (1, 2)


async def test_without_another_server_the_policy_answers_them(tmp_path: Path):
    async with running_gateway(tmp_path, "gateway.trained_calls=[{path: responses}]") as gateway:
        rollout = await gateway.create("memory", "off-policy")
        asked = {**json.loads(PLAYED), "temperature": 0.3, "seed": 4}
        answer = await gateway.call(rollout, asked)
        assert answer.status_code == 200
        assert gateway.last().body == {**asked, "model": gateway.last().body["model"]}
        assert answer.json()["choices"][0]["message"]["content"]
        assert await gateway.events(rollout, "model_request") == []
        await gateway.client.delete("/api/models")
        assert (await gateway.call(rollout, asked)).status_code == 503
        assert (await gateway.drain())["empo2/untrained_calls"] == 2
        async with openai.AsyncOpenAI(base_url=gateway.address(rollout), api_key=AGENT_KEY) as client:
            with pytest.raises(openai.BadRequestError, match=r"name a server that does with gateway\.other_server"):
                await client.embeddings.create(model="any", input="x")


async def test_a_server_that_is_down_is_an_error_of_the_call(tmp_path: Path):
    async with running_gateway(tmp_path, "gateway.other_server=http://127.0.0.1:1/v1") as gateway:
        answer = await gateway.client.post(f"{gateway.address(await gateway.create())}/embeddings", json={"input": "x"})
        assert answer.status_code == 502 and "calls that are not trained: ConnectError" in answer.text


RULES: list[tuple[str, tuple[str, dict[str, str], Any], bool]] = [
    ("[{model: 'gpt-4o*'}]", ("chat/completions", {}, {"model": "gpt-4o-mini"}), True),
    ("[{path: /responses}]", ("responses", {}, {}), True),
    ("[{header: 'X-Role: player'}]", ("messages", {"x-role": "player"}, {}), True),
    ("[{header: 'X-Role: player'}]", ("messages", {"x-role": "judge"}, {}), False),
    ("[{header: x-role}]", ("messages", {}, {}), False),
    ("[{path: messages, model: a}, {model: b}]", ("messages", {}, {"model": "b"}), True),
]


@pytest.mark.parametrize(("rules", "call", "trained"), RULES)
def test_rules(rules: str, call: tuple[str, dict[str, str], Any], trained: bool):
    choice = choice_of(load_settings("cpu", [f"gateway.trained_calls={rules}"]).gateway.trained_calls)
    assert choice is not None
    assert choice(*call) is trained


async def test_a_function_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = "def trained(path, headers, body): return 1 / (path == 'chat/completions') and 'x-judge' not in headers"
    (tmp_path / "my_choice.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_choice", raising=False)
    async with gateway_and_other(tmp_path, "gateway.trained_calls=my_choice:trained") as (gateway, _):
        rollout = await gateway.create()
        assert (await gateway.call(rollout, PLAYED)).status_code == 200
        assert (await gateway.call(rollout, PLAYED, headers={"X-Judge": "1"})).status_code == 201
        failed = await gateway.call(rollout, b'{"prompt": "x"}')
        assert failed.status_code == 500 and "gateway.trained_calls failed: ZeroDivisionError" in failed.text


def test_wrong_values_are_refused_before_the_start():
    for value, says in (
        ("nowhere:trained", "gateway.trained_calls='nowhere:trained': cannot be imported: No module named 'nowhere'"),
        ("[{modle: a}]", "there is no such setting"),
        ("player", "gateway.trained_calls"),
    ):
        with pytest.raises(ConfigError) as refused:
            choice_of(load_settings("cpu", [f"gateway.trained_calls={value}"]).gateway.trained_calls)
        assert says in str(refused.value)


async def test_calls_that_the_policy_answers_untrained_have_its_limits(tmp_path: Path):
    """What would hold up the policy's servers is refused there too; a server of the user's own decides itself."""
    odd = [{"n": 64}, {"chat_template": "{{ x }}"}, {"prompt_embeds": "eA=="}]
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}]}
    odd += [{"messages": [image]}]
    async with running_gateway(tmp_path, "gateway.trained_calls=[{path: responses}]") as gateway:
        rollout = await gateway.create("memory")
        for change in odd:
            assert (await gateway.call(rollout, {**json.loads(PLAYED), **change})).status_code == 400, change
        assert gateway.model.seen == []
    async with gateway_and_other(tmp_path, "gateway.trained_calls=[{path: responses}]") as (gateway, sent):
        rollout = await gateway.create("memory")
        for change in odd:
            assert (await gateway.call(rollout, {**json.loads(PLAYED), **change})).status_code == 201
        assert len(sent) == len(odd)


async def test_calls_that_the_policy_answers_untrained_are_read_in_their_dialect(tmp_path: Path):
    """A long system text is no parameter, an image in a result is seen, and a stream waits for the weights."""
    async with running_gateway(tmp_path, "gateway.trained_calls=[{path: completions}]") as gateway:
        rollout = await gateway.create("memory")

        async def answer(path: str, body: Any) -> tuple[int, str]:
            answer = await gateway.client.post(f"{gateway.address(rollout)}/{path}", json=body)
            return answer.status_code, answer.text

        asked: Any = {"model": "judge", "max_tokens": 8, "messages": [{"role": "user", "content": "x"}]}
        assert (await answer("messages", {**asked, "system": "be fair " * 3500}))[0] == 200
        assert (await answer("responses", {"input": "be fair " * 3500}))[0] == 200
        image = {"type": "input_image", "image_url": "http://10.0.0.1/x"}
        found = {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/x"}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [found]}
        for path, body in (
            ("responses", {"input": [{"role": "user", "content": [image]}]}),
            ("messages", {**asked, "messages": [{"role": "user", "content": [result]}]}),
        ):
            status, text = await answer(path, body)
            assert status == 400 and "fetch no addresses" in text
        before = len(gateway.model.requests())
        (await gateway.client.post("/empo2/pause", json={"timeout": 1})).raise_for_status()
        waiting = asyncio.create_task(answer("messages", {**asked, "stream": True}))
        await asyncio.sleep(0.3)
        assert not waiting.done() and len(gateway.model.requests()) == before == 2
        (await gateway.client.post("/empo2/resume")).raise_for_status()
        status, text = await waiting
        assert status == 200 and text.startswith("event: message_start")
        metrics = await gateway.drain()
    assert (metrics["empo2/untrained_calls"], metrics["empo2/calls"]) == (5, 0)


async def test_a_call_beside_the_main_chat_is_told_by_its_own_rollout(tmp_path: Path):
    """A rollout that never offers tools keeps its calls, whatever others do."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    title = {"messages": [{"role": "user", "content": "a title, please"}], "max_tokens": 8, "bad_words": ["x"]}
    async with running_gateway(tmp_path) as gateway:
        with_tools, without = await gateway.create(), await gateway.create()
        assert (await gateway.call(with_tools, {**title, "tools": [tool]})).status_code == 200
        for rollout in (with_tools, without):
            assert (await gateway.call(rollout, title)).status_code == 200
            assert "bad_words" not in gateway.last().body
        assert [len(await gateway.calls(rollout)) for rollout in (with_tools, without)] == [1, 1]
        assert (await gateway.drain())["empo2/side_calls"] == 1


@pytest.mark.parametrize("model", ["policy", "judge"])
async def test_a_call_ends_with_its_agent_and_its_rollout(tmp_path: Path, model: str) -> None:
    """Whether it is trained or not: the policy is not kept busy by what nobody waits for."""
    async with running_gateway(tmp_path, "gateway.trained_calls=[{model: policy}]") as gateway:
        gateway.model.delay = lambda path, body: 5
        rollout, asked = await gateway.create("memory"), {"model": model, "max_tokens": 8, "messages": [user("x")]}
        async with gateway.as_agent() as agent:
            with pytest.raises(httpx.TimeoutException):
                await agent.post(f"{gateway.address(rollout)}/chat/completions", json=asked, timeout=0.5)
        await until(lambda: gateway.last().gone)
        gateway.model.delay = lambda path, body: 0
        assert (await gateway.call(rollout, asked)).status_code == 200
        await gateway.finish(rollout)
        await gateway.drain()
        await gateway.client.delete(f"/api/rollouts/{rollout}")
        assert (await gateway.call(rollout, asked)).status_code == 404
