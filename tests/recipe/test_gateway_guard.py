"""Nothing that one agent sends holds up the others, opens what is not its own, or stops the trainer."""

import asyncio
import hmac
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from agentlightning.server.store import _rollouts
from starlette.applications import Starlette

from empo2.memory import MemoryStore
from empo2.recipe.cli import main
from empo2.recipe.controller.run import check_gateway
from empo2.recipe.errors import Empo2Error
from empo2.recipe.gateway import app, routes
from empo2.recipe.gateway.logs import configure_logs
from empo2.recipe.protocol import Keys
from empo2.recipe.trainer.gateway_client import GatewayClient

from .harness import (
    AGENT_KEY,
    BLOCK,
    KEY,
    ROOMS,
    GatewayUnderTest,
    Words,
    as_trainer,
    fill_memory,
    running_gateway,
    turns,
)
from .model_server import MODEL, ModelServer, serving

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def content(value: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": value}]}).encode()


@contextmanager
def real_logs() -> Iterator[None]:
    """The gateway's own log, for once."""
    configure_logs()
    try:
        yield
    finally:
        logging.raiseExceptions = True
        logging.basicConfig(force=True)
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


# Shapes

_SECRET = b'{"role": "user", "content": "a secret"}'
NO_CHAT = [
    *(b'{"messages": %s}' % value for value in [b'["a secret"]', b'[["a secret"]]', b"null", b'"a secret"', b"[]"]),
    *(b'{"messages": %s}' % nested(depth) for depth in (100, 200, 900, 1_000_000)),
    b'{"x": %s, "messages": [%s]}' % (nested(900), _SECRET),
    b'{"messages": [{"content": "a secret"}]}',
    b'{"messages": [{"role": ["a secret"], "content": "x"}]}',
    *map(content, [3, {"a secret": 1}, ["a secret"], [{"text": {"a secret": 1}}]]),
    *(b"{}", b'["a secret"]', b'{"messages": [', b'{"messages": "\xff"}', b""),
    *(b'{"top_p": %s, "messages": [%s]}' % (number, _SECRET) for number in (b"NaN", b"1e400")),
    b'{"messages": [{"role": "user", "content": "a secret \\ud83d"}]}',  # half a pair
]


@pytest.mark.parametrize("mode", ["memory", None])
async def test_what_is_no_chat_is_refused_at_once(
    gateway: GatewayUnderTest, mode: str | None, capfd: pytest.CaptureFixture[str]
):
    rollout = await gateway.create(mode, "off-policy")
    with real_logs():
        for body in NO_CHAT:
            answer = await gateway.call(rollout, body)
            assert answer.status_code == 400, body[:80]
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error" and error["message"], body[:80]
            assert "a secret" not in answer.text, body[:80]
    assert gateway.model.seen == gateway.words.texts == []
    assert "".join(capfd.readouterr()) == ""


async def test_what_the_guard_lets_through_can_be_read_by_the_trainer(gateway: GatewayUnderTest):
    rollout = await gateway.create("memory")
    deep = b'{"x": ' + nested(195) + b', "messages": [{"role": "user", "content": "hi"}]}'
    parts = content(
        [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}, {"text": None}]
    )
    for body in (deep, b'{"messages": [{"role": "assistant", "tool_calls": []}, {"role": "user", "content": ""}]}'):
        assert (await gateway.call(rollout, body)).status_code == 200
    assert (await gateway.call(rollout, parts)).status_code != 500
    event = {"event_type": "note", "data": json.loads(b'{"x": ' + nested(195) + b"}")}
    assert (await gateway.client.post(f"/api/rollouts/{rollout}/attempt/0/events", json=event)).status_code == 200
    assert len(await gateway.events(rollout, "model_request")) >= 2
    assert len(await gateway.events(rollout, "note")) == 1


async def test_what_json_cannot_carry_is_not_an_error_of_the_server(gateway: GatewayUnderTest):
    """Nor of the trainer, which a reward that no double holds would stop."""
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
    assert (await gateway.ended(rollout, 2.0))["empo2/tips_written"] == 1


async def test_a_chat_that_is_too_large_holds_up_nobody(gateway: GatewayUnderTest):
    rollout = await gateway.create("memory")
    large = asyncio.create_task(gateway.call(rollout, content("x" * 50_000_000)))
    slowest = 0.0
    while not large.done():
        started = time.perf_counter()
        assert (await gateway.client.get("/healthz")).status_code == 200
        slowest = max(slowest, time.perf_counter() - started)
    assert (await large).status_code == 413
    assert "gateway.max_request=4 MiB" in (await large).json()["error"]["message"]
    assert slowest < 5
    assert (await gateway.call(rollout, content("x " * 1_000_000))).status_code == 400  # the model server's own answer


# Keys

OF_AGENTS = [
    ("POST", "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions", {"messages": ROOMS[0]["messages"]}),
    ("POST", "/api/rollouts/{}/attempt/0/events", {"event_type": "reward", "data": {"value": 1}}),
    ("GET", "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/models/m", None),
    ("GET", "/api/rollouts?state_in=running", None),
    ("GET", "/api/rollouts/{}/events?event_type=reward", None),
    ("PATCH", "/api/rollouts/{}", {"status": {"state": "succeeded"}}),
]
OF_THE_TRAINER = [
    ("GET", "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/modelsx", None),
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
    """And an unknown key opens nothing, before any work is done."""
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
    for method, route, body in OF_THE_TRAINER:
        if "{}" in route and not route.startswith("/empo2"):
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
        client = GatewayClient(url, key)
        with pytest.raises(Empo2Error, match=said), closing(client):
            await asyncio.to_thread(client.check, {})
    for key in ("", "wrong", KEY):  # no rollout's key is made from the admin key
        with pytest.raises(Empo2Error, match=f"^the gateway at {url} refuses the key; EMPO2_KEY must be the gateway's"):
            await asyncio.to_thread(check_gateway, url, key)
    await asyncio.to_thread(check_gateway, url, AGENT_KEY)
    with serving(Starlette()) as elsewhere, pytest.raises(Empo2Error, match=f"^{elsewhere} is not an EMPO² gateway"):
        await asyncio.to_thread(check_gateway, elsewhere, AGENT_KEY)


async def test_a_controller_waits_for_a_gateway_that_is_not_there_yet(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    url = str(gateway.client.base_url).rstrip("/")
    refused = [httpx.ConnectError("refused"), httpx.ConnectError("refused")]
    get = httpx.Client.get

    def get_later(client: httpx.Client, *given: Any, **options: Any) -> httpx.Response:
        if refused:
            raise refused.pop()
        return get(client, *given, **options)

    monkeypatch.setattr(httpx.Client, "get", get_later)
    await asyncio.to_thread(check_gateway, url, AGENT_KEY)
    assert not refused and capsys.readouterr().err == f"waiting for a gateway at {url} (refused)\n"
    with pytest.raises(Empo2Error, match=r"^--gateway gw:8080: not an address"):
        check_gateway("gw:8080", AGENT_KEY)


# Files


@pytest.mark.parametrize("verb", ["snapshot", "restore"])
async def test_the_gateway_touches_only_memory_files_below_its_folder(tmp_path: Path, verb: str):
    (folder := tmp_path / "run").mkdir()
    outside = [
        tmp_path / "keys.sqlite",
        tmp_path / "absent.sqlite",
        folder / "authorized_keys",
        folder / "way/a.sqlite",
    ]
    (folder / "way").symlink_to(tmp_path)
    outside[0].write_text("a key")
    (folder / "authorized_keys").write_text("a key")
    (folder / "notes.sqlite").write_text("something of the user's")
    os.mkfifo(folder / "pipe.sqlite")
    (folder / "folder.sqlite").mkdir()
    async with running_gateway(folder) as gateway:
        before = sorted(tmp_path.rglob("*"))
        reasons = set()
        for path in [*map(str, outside), "../keys.sqlite"]:
            answer = await gateway.client.post(f"/empo2/{verb}", json={"path": path})
            assert answer.status_code == 409
            reasons.add(answer.json()["detail"].removeprefix(path))
        assert len(reasons) == 1  # whether a file is there is not told
        for name in ("notes.sqlite", "pipe.sqlite", "folder.sqlite"):
            async with asyncio.timeout(5):
                answer = await gateway.client.post(f"/empo2/{verb}", json={"path": name})
            assert answer.status_code == 409 and name in answer.json()["detail"]
        assert sorted(tmp_path.rglob("*")) == before
    assert outside[0].read_text() == (folder / "authorized_keys").read_text() == "a key"
    assert (folder / "notes.sqlite").read_text() == "something of the user's"


@pytest.mark.parametrize("trouble", ["no folder", "damaged pages", "a pipe", "no memory", "in use"])
def test_a_gateway_does_not_start_without_its_memory(
    tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "memory.sqlite"
    monkeypatch.setattr("empo2.recipe.gateway.memory.SentenceEmbedder", lambda *args, **options: Words())
    monkeypatch.setattr(Words, "name", "all-MiniLM-L6-v2")
    monkeypatch.setattr("empo2.recipe.gateway.logs.configure_logs", lambda: None)
    store = None
    if trouble == "no folder":
        file = tmp_path / "nowhere" / "memory.sqlite"
    elif trouble == "a pipe":
        os.mkfifo(file)
    elif trouble == "no memory":
        file.write_text("something of the user's")
    else:
        fill_memory(file, [f"{number} {'t' * 900}" for number in range(50)], embedder=Words.name)
        store = MemoryStore(file, embedder=Words.name, dimension=64)
        if trouble == "damaged pages":
            store.close()
            damaged = bytearray(file.read_bytes())
            damaged[8192:-4096] = b"\x07" * len(damaged[8192:-4096])
            file.write_bytes(damaged)
    assert main(["gateway", "--profile", "cpu", "--memory", str(file)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and str(file) in error, error
    if store and trouble == "in use":
        store.close()


# Deadlines


async def test_a_slow_embedder_costs_a_call_its_tips_and_the_deadline(tmp_path: Path):
    async with running_gateway(tmp_path, "memory.deadline=200") as gateway:
        await gateway.store_tips(ROOMS, "tip")
        gateway.words.gate.clear()
        rollout = await gateway.create("memory", "off-policy")
        started = time.perf_counter()
        assert (await gateway.call(rollout, content("never seen"))).status_code == 200
        assert time.perf_counter() - started >= 0.2
        assert BLOCK not in gateway.last().prompt
        gateway.words.gate.set()
        await gateway.calls(rollout)
        metrics = await gateway.drain()
        assert (metrics["empo2/memory_late"], metrics["empo2/memory_failures"]) == (1, 0)


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Another process that writes the memory file, for as long as it likes."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


async def test_a_file_that_another_process_holds_delays_no_call(tmp_path: Path):
    """Its writes wait 5 seconds each; the calls behind them are sent without tips, and a drain is answered in time."""
    async with running_gateway(tmp_path, "memory.deadline=200") as gateway:
        await gateway.store_tips(ROOMS, "tip")
        first = await gateway.create("memory")
        await gateway.play(first, ROOMS[:1])
        await gateway.store_tips(turns("cellar"), "other", scope="b")
        with held(tmp_path / "memory.sqlite"):
            await gateway.finish(first)  # its credit waits for the file
            await asyncio.sleep(0.5)
            started = time.perf_counter()
            second = await gateway.create("memory")
            for body in ROOMS:
                assert (await gateway.call(second, body)).status_code == 200
            assert time.perf_counter() - started < 10  # each would wait 5 seconds and more
            started = time.perf_counter()
            metrics = await gateway.drain(timeout=1)
            assert time.perf_counter() - started < 1 + routes._COMMIT_SECONDS + 10
            assert metrics["empo2/memory_late"] >= 1
            assert metrics["empo2/memory_failures"] >= 1


async def test_a_drain_does_not_wait_for_a_memory_that_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "_COMMIT_SECONDS", 0.5)
    async with running_gateway(tmp_path) as gateway:
        rollout = await gateway.create("no-memory")
        gateway.words.gate.clear()
        await gateway.call(rollout, ROOMS[0])
        await gateway.finish(rollout)
        metrics = await gateway.drain(timeout=0.5)
        assert metrics["empo2/reflections_failed"] == 1
        gateway.words.gate.set()


_STUCK = """
import sys, time
from empo2.recipe.cli import gateway as cli
from empo2.recipe.gateway import memory
from empo2.recipe.cli import main

class Stuck:
    name, dimension = "stuck", 2
    def embed(self, texts):
        time.sleep(1000)

memory.SentenceEmbedder = lambda *args, **options: Stuck()
cli._STOP_SECONDS = 4
sys.exit(main(sys.argv[1:]))
"""


async def test_a_gateway_with_a_stuck_memory_and_a_silent_model_server_ends(tmp_path: Path):
    model = ModelServer(fault=lambda path, body: "hang")
    keys = {"EMPO2_KEY": AGENT_KEY, "EMPO2_ADMIN_KEY": KEY}
    command = [sys.executable, "-c", _STUCK, "gateway", "--profile", "cpu", "memory.deadline=100"]
    with model.serve(), (tmp_path / "log").open("w+") as log:
        options: Any = {"cwd": tmp_path, "env": {**os.environ, **keys}, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, stderr=log, **options)
        assert process.stdout
        with process.stdout:
            url = process.stdout.readline().split()[2].rstrip(",")
        try:
            async with as_trainer(url) as client:
                await client.post("/api/models", json=[{"model": MODEL, "endpoint": model.url}])
                gateway = GatewayUnderTest(client, model, Words(), tmp_path)
                rollout = await gateway.create("memory")
                call = asyncio.create_task(gateway.call(rollout, ROOMS[0]))
                while not model.requests():
                    await asyncio.sleep(0.05)
                started = time.monotonic()
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.wait, 40)
                assert time.monotonic() - started < 30
                await asyncio.gather(call, return_exceptions=True)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        assert "Traceback" not in log.read()


# Attempts


@pytest.mark.parametrize(("counted", "score"), [("1", 7.0), ("0", 3.0), (None, 3.0)])
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


# What nobody deletes


async def test_rollouts_that_nobody_deletes_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "_LIFETIME_SECONDS", 2)
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


# The log


def test_an_error_is_one_line_without_what_the_agent_said(capfd: pytest.CaptureFixture[str]):
    with real_logs():
        try:
            prompt = "a secret"
            raise ValueError(f"{prompt}\nin two lines")
        except ValueError as error:
            structlog.get_logger().exception("failed")
            structlog.get_logger().error("failed", exc_info=error)
            logging.getLogger("some.library").exception("Exception in ASGI application\n")
    out = "".join(capfd.readouterr())
    assert len(out.splitlines()) == out.count("ValueError") == 3
    assert "a secret" not in out and "Traceback" not in out
