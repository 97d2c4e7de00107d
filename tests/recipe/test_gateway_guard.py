"""Nothing that one agent sends holds up the others, opens what is not its own, or stops the trainer."""

import asyncio
import hmac
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import structlog
from agentlightning.server.store import _rollouts
from starlette.applications import Starlette

from empo2.memory import MemoryStore
from empo2.recipe.cli import main
from empo2.recipe.controller.run import check_gateway
from empo2.recipe.errors import Empo2Error
from empo2.recipe.gateway import app
from empo2.recipe.gateway.logs import configure_logs
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.protocol import Keys

from .harness import AGENT_KEY, BLOCK, KEY, ROOMS, GatewayUnderTest, Words, assistant, running_gateway, turns, user
from .model_server import serving

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def content(value: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": value}]}).encode()


@pytest.fixture
def real_logs() -> Iterator[Callable[[], None]]:
    yield configure_logs
    logging.raiseExceptions = True
    logging.basicConfig(force=True)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


_SECRET = b'{"role": "user", "content": "a secret"}'
NO_CHAT = [
    *(b'{"messages": %s}' % value for value in [b'["a secret"]', b'"a secret"', b"[]", nested(100), nested(1_000_000)]),
    b'{"x": %s, "messages": [%s]}' % (nested(900), _SECRET),
    b'{"messages": [{"content": "a secret"}]}',
    *map(content, [{"a secret": 1}, ["a secret"], [{"text": {"a secret": 1}}]]),
    *(b"{}", b'["a secret"]', b'{"messages": [', b'{"messages": "\xff"}', b""),
    *(b'{"top_p": %s, "messages": [%s]}' % (number, _SECRET) for number in (b"NaN", b"1e400")),
    *(
        b'{"messages": [%s, {"role": "assistant", "tool_calls": %s}]}' % (_SECRET, calls)
        for calls in (b'"x"', b'["x"]', b'[{"function": "x"}]', b'[{"id": ["x"], "function": {"name": "x"}}]')
    ),
    b'{"messages": [{"role": "user", "content": "a secret \\ud83d"}]}',  # half a pair
]


async def test_what_is_no_chat_is_refused_at_once(
    gateway: GatewayUnderTest, real_logs: Callable[[], None], capfd: pytest.CaptureFixture[str]
):
    real_logs()
    rollout = await gateway.create("memory", "off-policy")
    for body in NO_CHAT:
        answer = await gateway.call(rollout, body)
        assert answer.status_code == 400, body[:80]
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"], body[:80]
        assert "a secret" not in answer.text, body[:80]
    assert gateway.model.seen == gateway.words.texts == []
    assert "".join(capfd.readouterr()) == ""


async def test_a_schema_or_an_effort_that_is_odd_is_the_model_servers_to_refuse(gateway: GatewayUnderTest):
    """A schema may be `true`; and the first call to have tools is the second one that looks at them."""
    rollout, odd = await gateway.create("memory"), {"type": "object", "properties": {"x": True, "y": {"default": 1}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": odd}}]
    for number, more in enumerate(({"tools": tools}, {"tools": tools}, {"reasoning_effort": ["low"]})):
        chat = [user("hi"), *(message for _ in range(number) for message in (assistant("go 0"), user("hi")))]
        assert (await gateway.call(rollout, {"messages": chat, **more})).status_code == 200, more


async def test_what_json_cannot_carry_is_not_an_error_of_the_server(gateway: GatewayUnderTest):
    rollout = await gateway.create("memory")
    await gateway.play(rollout, ROOMS[:1])
    route = f"/api/rollouts/{rollout}/attempt/0/events"
    rewards = ["1e400", "NaN", "1" + "0" * 400, "-Infinity"]
    posts = [(route, f'{{"event_type": "reward", "data": {{"value": {value}}}}}') for value in rewards]
    posts += [("/empo2/drain", '{"timeout": NaN}'), ("/empo2/drain", '{"timeout": 1e999}')]
    posts += [("/empo2/snapshot", '{"path": "\\ud800"}'), ("/empo2/restore", '{"path": NaN}')]
    for path, body in posts:
        answer = await gateway.client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["detail"], body
    deep = b'{"x": ' + nested(195) + b', "messages": [{"role": "user", "content": "hi"}]}'  # this it can carry
    assert (await gateway.call(rollout, deep)).status_code == 200
    assert len(await gateway.events(rollout, "model_request")) == 2
    assert (await gateway.ended(rollout, 2.0))["empo2/tips_written"] == 1


async def test_a_chat_that_is_too_large_holds_up_nobody(gateway: GatewayUnderTest):
    rollout = await gateway.create("memory")
    large = asyncio.create_task(gateway.call(rollout, content("x" * 50_000_000)))
    while not large.done():
        started = time.perf_counter()
        assert (await gateway.client.get("/healthz")).status_code == 200
        assert time.perf_counter() - started < 5
    assert (await large).status_code == 413
    assert "gateway.max_request=4 MiB" in (await large).json()["error"]["message"]
    assert (await gateway.call(rollout, content("x " * 1_000_000))).status_code == 400  # the model server's own answer


async def test_the_tasks_of_a_step_may_be_larger_than_what_agents_send(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, "gateway.max_request=0.1") as gateway:
        tasks = [{"input": {"document": "x" * 3_000}, "metadata": {}} for _ in range(128)]
        assert (await gateway.client.post("/api/rollouts", json=tasks)).status_code == 201
        rollout = await gateway.create("memory")
        assert (await gateway.call(rollout, content("x" * 384_000))).status_code == 413


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"regex": "(?i)yes|no"}, False),
        ({"regex": "[]|]"}, False),
        ({"regex": "a{2,1}"}, False),
        ({"regex": "yes|no"}, True),
        ({"grammar": 'root ::= "a"\nroot ::= "b"'}, False),
        ({"grammar": 'root ::= "a" | "b"'}, True),
        ({"grammar": 'start: "a"'}, True),  # Lark's
        ({"regex": 3}, True),  # vLLM's own 400
        ({"choice": ["a", 'b"\\']}, True),
        ({"choice": ["a", "b\n"]}, False),
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, True),
        ({"json": '{"type": "string", "pattern": "("}'}, False),
        ("yes", True),
    ],
)
async def test_a_grammar_that_would_end_vllm_does_not_reach_it(gateway: GatewayUnderTest, given: Any, taken: bool):
    """In vLLM 0.20.2 one that guidance takes and xgrammar does not, after a request that xgrammar answered."""
    rollout = await gateway.create("memory")
    for stream in (False, True):
        answer = await gateway.call(rollout, {**ROOMS[0], "structured_outputs": given, "stream": stream})
        assert answer.status_code == (200 if taken else 400), answer.text
    assert len(gateway.model.requests()) == 2 * taken
    if not taken:
        (name,) = given
        assert f"structured_outputs.{name}: xgrammar does not take it: " in answer.json()["error"]["message"]


async def test_a_schema_that_would_end_vllm_does_not_reach_it(gateway: GatewayUnderTest):
    """Of an answer, and of a tool that must be called; nobody holds the reply to that of another tool."""
    rollout, bad = await gateway.create("memory"), {"type": "string", "pattern": "("}
    tool = {"type": "function", "function": {"name": "look", "parameters": bad}}
    held = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}}
    cases = [
        (held, 400),
        *(({"tools": [tool], "tool_choice": how}, code) for how, code in (("required", 400), ("auto", 200))),
    ]
    for given, code in cases:
        answer = await gateway.call(rollout, {**ROOMS[0], **given})
        assert answer.status_code == code, answer.text
    asked = {"model": "any", "messages": [user("hi")], "max_tokens": 8}
    for path, body in (
        ("responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": bad}}}),
        ("messages", {**asked, "output_config": {"format": {"type": "json_schema", "schema": bad}}}),
        ("messages", {**asked, "tools": [{"name": "x", "input_schema": bad}], "tool_choice": {"type": "any"}}),
    ):
        answer = await gateway.client.post(f"{gateway.address(rollout)}/{path}", json=body)
        assert answer.status_code == 400 and "xgrammar does not take it" in answer.text, answer.text


def test_which_grammars_end_vllm():
    """What `grammars` stands against: vLLM's check takes them with guidance, its engine gives them to xgrammar."""
    from llguidance import LLMatcher, grammar_from
    from xgrammar import Grammar

    for pattern in ("(?i)yes|no", "[]|]"):
        assert not LLMatcher.validate_grammar(grammar_from("regex", pattern))
        with pytest.raises(RuntimeError):
            Grammar.from_regex(pattern)


OF_AGENTS = [
    ("POST", "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions", {"messages": ROOMS[0]["messages"]}),
    ("POST", "/api/rollouts/{}/attempt/0/events", {"event_type": "reward", "data": {"value": 1}}),
    ("GET", "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/models/m", None),
    ("GET", "/api/rollouts?state_in=running", None),
    ("GET", "/api/rollouts/{}/events?event_type=reward", None),
    ("PATCH", "/api/rollouts/{}", {"status": {"state": "succeeded"}}),
]
OF_THE_TRAINER = [
    ("GET", "/empo2/state", None),
    ("POST", "/empo2/drain", {"timeout": 1}),
    ("POST", "/empo2/snapshot", {"path": "planted.sqlite"}),
    ("POST", "/empo2/restore", {"path": "planted.sqlite"}),
    ("POST", "/empo2/rollouts/{}/settle", None),
    ("POST", "/api/models", [{"model": "m", "endpoint": "http://127.0.0.1:1"}]),
    ("DELETE", "/api/models", None),
    ("POST", "/api/rollouts", [{"input": {}}]),
    ("GET", "/api/rollouts/{}/events", None),
    ("GET", "/api/rollouts/{}/events?event_type=model_request", None),
    ("GET", "/api/rollouts/{}/events?event_type=reward&event_type=model_request", None),
    ("DELETE", "/api/rollouts/{}", None),
    ("POST", "/proxy/pause", {}),
    ("POST", "/proxy/resume", None),
]


async def test_the_agents_key_opens_what_agents_and_the_controller_need(gateway: GatewayUnderTest):
    rollout = await gateway.create("memory")
    for method, route, body in OF_AGENTS + OF_THE_TRAINER:
        for key in ("", "Bearer wrong"):
            wrong = {"Authorization": key}
            answer = await gateway.client.request(method, route.format(rollout), json=body, headers=wrong)
            assert answer.status_code == 401 and "Invalid or missing API key" in answer.text, (method, route)
    assert gateway.words.texts == gateway.model.seen == []
    assert (await gateway.client.get("/healthz", headers={"Authorization": ""})).status_code == 200
    async with gateway.as_agent() as agent:
        for method, route, body in OF_AGENTS:
            answer = await agent.request(method, route.format(rollout), json=body)
            assert answer.status_code == 200, (method, route, answer.text)
        for method, route, body in OF_THE_TRAINER:
            answer = await agent.request(method, route.format(rollout), json=body)
            assert answer.status_code == 403 and "admin key" in answer.json()["detail"], (method, route)
        other = await agent.get("/api/rollouts?state_in=running", headers={"Authorization": "", "x-api-key": AGENT_KEY})
        assert other.status_code == 200
    assert not (gateway.folder / "planted.sqlite").exists()
    assert (await gateway.client.get("/empo2/state")).status_code == 200


async def test_a_rollouts_key_opens_what_is_about_the_rollout_and_nothing_else(gateway: GatewayUnderTest):
    mine, other = await gateway.create("memory"), await gateway.create("memory")
    bearer = {"Authorization": f"Bearer {hmac.new(AGENT_KEY.encode(), mine.encode(), 'sha256').hexdigest()}"}
    for method, route, body in OF_AGENTS + OF_THE_TRAINER:
        answer = await gateway.client.request(method, route.format(other), json=body, headers=bearer)
        if "{}" not in route or (method, route, body) in OF_AGENTS:  # of nobody, or of the other
            assert answer.status_code == 401, (method, route)
        if (method, route, body) in OF_THE_TRAINER and "{}" in route and not route.startswith("/empo2"):
            answer = await gateway.client.request(method, route.format(mine), json=body, headers=bearer)
            assert answer.status_code == 403, (method, route)
    assert await gateway.events(other, "reward") == await gateway.events(mine, "reward") == []
    for headers in (bearer, {"Authorization": "", "x-api-key": bearer["Authorization"].removeprefix("Bearer ")}):
        for method, route, body in OF_AGENTS:
            if "{}" in route and (method, headers) != ("PATCH", bearer):  # a rollout ends once
                answer = await gateway.client.request(method, route.format(mine), json=body, headers=headers)
                assert answer.status_code == 200, (method, route, answer.text)
    assert len(await gateway.events(mine, "reward")) == 2
    assert (await gateway.client.get(f"/api/rollouts/{other}")).json()["rollout"]["status"]["state"] == "running"
    assert Keys(admin="a").of_rollout(mine) == ""  # an empty key opens nothing


async def test_parts_of_a_run_name_the_key_that_is_missing_or_wrong(gateway: GatewayUnderTest):
    url = str(gateway.client.base_url).rstrip("/")
    for key, why in (("", "is not set"), ("wrong", "is wrong"), (AGENT_KEY, "is an agent's key")):
        said = f"^EMPO2_ADMIN_KEY {why}: give the gateway at {url} and its trainer the same one$"
        with pytest.raises(Empo2Error, match=said), closing(GatewayClient(url, key)) as client:
            await asyncio.to_thread(client.check, {})
    for key in ("", "wrong", KEY):  # no rollout's key is made from the admin key
        with pytest.raises(Empo2Error, match=f"^the gateway at {url} refuses the key; EMPO2_KEY must be the gateway's"):
            await asyncio.to_thread(check_gateway, url, key)
    await asyncio.to_thread(check_gateway, url, AGENT_KEY)
    for no_address in ("gw:8080", "http://gw:PORT", "http://", ""):
        for ask in (check_gateway, GatewayClient):
            with pytest.raises(Empo2Error, match=f"^--gateway {no_address}: not an address"):
                ask(no_address, AGENT_KEY)
    with serving(Starlette()) as elsewhere, pytest.raises(Empo2Error, match=f"^{elsewhere} is not an EMPO² gateway"):
        await asyncio.to_thread(check_gateway, elsewhere, AGENT_KEY)


@pytest.mark.parametrize("verb", ["snapshot", "restore"])
async def test_the_gateway_touches_only_memory_files_below_its_folder(tmp_path: Path, verb: str):
    (folder := tmp_path / "run").mkdir()
    keys, notes = tmp_path / "keys.sqlite", folder / "notes.sqlite"
    (folder / "way").symlink_to(tmp_path)
    keys.write_text("a key")
    notes.write_text("something of the user's")
    os.mkfifo(folder / "pipe.sqlite")
    async with running_gateway(folder) as gateway:
        before = sorted(tmp_path.rglob("*"))
        reasons = set()
        outside = (keys, tmp_path / "absent.sqlite", folder / "authorized_keys", folder / "way/a.sqlite")
        for path in [*map(str, outside), "../keys.sqlite"]:
            answer = await gateway.client.post(f"/empo2/{verb}", json={"path": path})
            assert answer.status_code == 409
            reasons.add(answer.json()["detail"].removeprefix(path))
        assert len(reasons) == 1  # whether a file is there is not told
        for name in ("notes.sqlite", "pipe.sqlite"):
            async with asyncio.timeout(5):
                answer = await gateway.client.post(f"/empo2/{verb}", json={"path": name})
            assert answer.status_code == 409 and name in answer.json()["detail"]
        assert sorted(tmp_path.rglob("*")) == before
    assert (keys.read_text(), notes.read_text()) == ("a key", "something of the user's")


@pytest.mark.parametrize("trouble", ["no folder", "no memory", "in use"])
def test_a_gateway_does_not_start_without_its_memory(
    tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / ("nowhere/memory.sqlite" if trouble == "no folder" else "memory.sqlite")
    monkeypatch.setattr("empo2.recipe.gateway.memory.SentenceEmbedder", lambda *args, **options: Words())
    monkeypatch.setattr(Words, "name", "all-MiniLM-L6-v2")
    monkeypatch.setattr("empo2.recipe.gateway.logs.configure_logs", lambda: None)
    if trouble == "no memory":
        file.write_text("something of the user's")
    in_use = trouble == "in use"
    with closing(MemoryStore(file, embedder=Words.name, dimension=64)) if in_use else nullcontext():
        assert main(["gateway", "--profile", "cpu", "--memory", str(file)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and str(file) in error, error


async def test_a_slow_embedder_costs_a_call_its_tips_and_the_deadline_and_a_drain_no_more(tmp_path: Path):
    async with running_gateway(tmp_path, "memory.deadline=200") as gateway:
        await gateway.store_tips(ROOMS, "tip")
        gateway.words.gate.clear()
        rollout = await gateway.create("memory", "off-policy")
        started = time.perf_counter()
        assert (await gateway.call(rollout, content("never seen"))).status_code == 200
        assert time.perf_counter() - started >= 0.2 and BLOCK not in gateway.last().prompt
        await gateway.finish(rollout)
        metrics = await gateway.drain(timeout=0.5)
        assert (metrics["empo2/memory_late"], metrics["empo2/reflections_failed"]) == (1, 1)
        gateway.words.gate.set()


@pytest.mark.parametrize(("counted", "score"), [("1", 7.0), (None, 3.0)])
async def test_a_tip_gets_the_reward_of_the_attempt_that_counts(
    gateway: GatewayUnderTest, counted: str | None, score: float
):
    """agent-lightning reads the events of ``last_attempt_id``, or of attempt 0."""
    rollout = await gateway.create("no-memory")
    for attempt, value, body in (("1", 7.0, turns("a cave")[0]), ("0", 3.0, turns("a room")[0])):
        calls = f"/proxy/rollout/{rollout}/attempt/{attempt}/mode/train/openai/v1/chat/completions"
        (await gateway.client.post(calls, json=body)).raise_for_status()
        event = {"event_type": "reward", "data": {"value": value}}
        (await gateway.client.post(f"/api/rollouts/{rollout}/attempt/{attempt}/events", json=event)).raise_for_status()
    status = {"state": "succeeded"} | ({"last_attempt_id": counted} if counted else {})
    (await gateway.client.patch(f"/api/rollouts/{rollout}", json={"status": status})).raise_for_status()
    assert [reward["value"] for reward in await gateway.events(rollout, "reward")] == [score]  # as the trainer reads
    await gateway.drain()
    tips, entries = await gateway.snapshot()
    assert tips == [("a", gateway.tip, score)]
    assert [state for state, _ in entries] == ["a cave" if score == 7.0 else "a room"]


@pytest.mark.slow
async def test_rollouts_that_nobody_deletes_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "_LIFETIME_SECONDS", 6)
    async with running_gateway(tmp_path) as gateway:
        old = [await gateway.create("memory"), await gateway.create(None)]
        await gateway.play(old[0], ROOMS[:1])
        played = await gateway.create("memory")
        while {*old} & {*_rollouts}:
            await gateway.call(played, ROOMS[0])
            await asyncio.sleep(0.2)
        assert played in _rollouts
        assert (await gateway.drain())["empo2/rollouts_expired"] == 2
        assert (await gateway.state())["episodes"] == 1


def test_an_error_is_one_line_without_what_the_agent_said(
    real_logs: Callable[[], None], capfd: pytest.CaptureFixture[str]
):
    real_logs()
    prompt = "a secret"
    try:
        raise ValueError(f"{prompt}\nin two lines")
    except ValueError as error:
        structlog.get_logger().exception("failed")
        structlog.get_logger().error("failed", exc_info=error)
        logging.getLogger("some.library").exception("Exception in ASGI application\n")
    out = "".join(capfd.readouterr())
    assert len(out.splitlines()) == out.count("ValueError") == 3
    assert prompt not in out and "Traceback" not in out
