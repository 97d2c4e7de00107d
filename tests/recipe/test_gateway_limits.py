"""What agents may post, how much, until when and with what parameters; and what strangers may hold open."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPResponse
from inspect import signature
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from empo2.recipe.gateway.connections import ADMIT, protocol_with_room
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.request import Request
from empo2.recipe.gateway.stages.access import check_key
from empo2.recipe.network import raise_descriptor_limit
from empo2.recipe.protocol import ADMIN_KEY, CALL_EVENT, ERROR_EVENT, KEY, Keys

from .harness import AGENT_KEY, GatewayUnderTest, as_trainer, running_gateway, user
from .harness import KEY as ADMIN
from .model_server import MODEL, ModelServer

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


def as_rollout(gateway: GatewayUnderTest, rollout: str) -> httpx.AsyncClient:
    key = gateway.variables(rollout)["AGL_KEY"]
    return httpx.AsyncClient(base_url=gateway.client.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def events_of(rollout: str) -> str:
    return f"/api/rollouts/{rollout}/attempt/0/events"


async def counted(gateway: GatewayUnderTest) -> dict[str, float]:
    metrics = (await gateway.client.post("/empo2/drain", json={"timeout": 10})).json()
    return {name: value for name, value in metrics.items() if name.startswith("empo2/refused")}


async def test_an_agent_posts_rewards_and_its_own_events_but_none_of_the_gateways(gateway: GatewayUnderTest) -> None:
    rollout = await gateway.create("memory")
    tokens = {"response": {"prompt_token_ids": [1], "choices": [{"token_ids": [10**6]}]}}
    async with as_rollout(gateway, rollout) as agent, gateway.as_agent() as controller:
        for client in (agent, controller):
            for kind, data in ((CALL_EVENT, {}), ("model_request", tokens), ("empo2_anything", {})):
                answer = await client.post(events_of(rollout), json={"event_type": kind, "data": data})
                assert answer.status_code == 403 and "is the gateway's" in answer.json()["detail"], kind
            for kind in ("reward", ERROR_EVENT, "note"):
                answer = await client.post(events_of(rollout), json={"event_type": kind, "data": {"value": 1}})
                assert answer.status_code == 200, kind
    for kind, count in (("reward", 2), (ERROR_EVENT, 2), ("note", 2), (CALL_EVENT, 0), ("model_request", 0)):
        assert len(await gateway.events(rollout, kind)) == count, kind
    assert await counted(gateway) == {"empo2/refused/event": 6}


async def test_an_agent_sets_its_rollouts_state_and_nothing_that_steers(gateway: GatewayUnderTest) -> None:
    rollout = await gateway.create("memory")
    route = f"/api/rollouts/{rollout}"
    async with as_rollout(gateway, rollout) as agent, gateway.as_agent() as controller:
        for name in ("k8s_job_name", "last_attempt_id"):
            answer = await agent.patch(route, json={"status": {name: "x", "error_message": "y"}})
            assert answer.status_code == 403 and name in answer.json()["detail"]
        assert (await controller.patch(route, json={"status": {"k8s_job_name": "job"}})).status_code == 200
        assert (await agent.patch(route, json={"status": {"state": "failed", "error_message": "z"}})).status_code == 200


async def test_after_its_end_a_rollout_takes_neither_calls_nor_rewards(gateway: GatewayUnderTest) -> None:
    rollout = await gateway.create("memory")
    reward = {"event_type": "reward", "data": {"value": 1}}
    async with as_rollout(gateway, rollout) as agent:
        assert (await agent.post(events_of(rollout), json=reward)).status_code == 200
        end = await agent.patch(f"/api/rollouts/{rollout}", json={"status": {"state": "succeeded"}})
        assert end.status_code == 200
        late = await agent.post(events_of(rollout), json=reward | {"data": {"value": 99}})
        assert late.status_code == 410
        call = await agent.post(gateway.address(rollout) + "/chat/completions", json={"messages": [user("again")]})
        assert call.status_code == 410 and "has ended" in call.json()["error"]["message"]
    assert [each["value"] for each in await gateway.events(rollout, "reward")] == [1]
    assert gateway.model.requests() == []
    own = await gateway.client.post(events_of(rollout), json=reward)  # the trainer's hooks may add events
    assert own.status_code == 200


async def test_a_rollout_that_sends_too_much_is_stopped_and_others_are_not(tmp_path: Any) -> None:
    async with running_gateway(tmp_path, "gateway.max_rollout=0.1") as gateway:
        mine, other = await gateway.create("memory"), await gateway.create("memory")
        event = {"event_type": "note", "data": {"text": "x" * 30_000}}
        async with as_rollout(gateway, mine) as agent:
            codes = [(await agent.post(events_of(mine), json=event)).status_code for _ in range(5)]
            call = await agent.post(gateway.address(mine) + "/chat/completions", json={"messages": [user("hi")]})
        assert codes == [200] * 3 + [413] * 2 and call.status_code == 413
        assert "gateway.max_rollout=0.1 MiB" in call.json()["error"]["message"]
        assert (await gateway.call(other, json.dumps({"messages": [user("hi")]}).encode())).status_code == 200
        assert await counted(gateway) == {"empo2/refused/too_much": 3}


OF_A_REQUEST = {"chat_template", "tools", "documents", "add_generation_prompt", "continue_final_message"}
OF_THE_TOKENIZER = (
    {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"self", "kwargs"} - OF_A_REQUEST
)

HOLD_UP = [
    ({"n": 64}, "n=64"),
    ({"n": 64.0}, "n=64"),  # vLLM reads both as 64
    ({"n": "64"}, "n=64"),
    ({"best_of": 9}, "n=9"),
    ({"min_tokens": 4000}, "min_tokens=4000"),
    ({"min_tokens": "4000"}, "min_tokens=4000"),
    ({"structured_outputs": {"regex": "(a|b)" * 20_000}}, "gateway.max_parameters"),
    ({"guided_regex": "a" * 100_000}, "gateway.max_parameters"),
    ({"stop": ["x" * 10] * 5000}, "gateway.max_parameters"),
    ({"logit_bias": {str(token): 1 for token in range(10_000)}}, "gateway.max_parameters"),
    ({"bad_words": ["bad"] * 10_000}, "gateway.max_parameters"),
    ({"allowed_token_ids": [*range(10_000)]}, "gateway.max_parameters"),
    ({"vllm_xargs": {"x" * 30_000: 1}}, "gateway.max_parameters"),
    ({"chat_template": "{% for _ in range(10**9) %}{% endfor %}"}, "chat_template: is the operator's"),
    ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs: must be an object"),
    ({"chat_template_kwargs": {"chat_template": "{{ 'x' * 10**9 }}"}}, "chat_template: is the operator's"),
    *(({"chat_template_kwargs": {name: 10**8}}, f"chat_template_kwargs.{name}: is no") for name in OF_THE_TOKENIZER),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds: is the operator's"),
    ({"prompt_token_ids": [5, -1]}, "prompt_token_ids: is the operator's"),
    ({"media_io_kwargs": {"video": {"num_frames": 10**9}}}, "media_io_kwargs: is the operator's"),
]
FETCHED = [
    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": "https://a.test/a.png"},
    {"type": "video_url", "video_url": {"url": "http://a.test"}},
    {"type": "audio_url", "audio_url": {"url": "http://a.test"}},
]

UNCHECKED: list[dict[str, Any]] = [
    {"allowed_token_ids": [10**6]},
    {"bad_words": ["x"]},
    {"stop_token_ids": [-1, 10**6], "min_tokens": 5},  # ends vLLM's engine
]
UNCHECKED_NAMES = {"allowed_token_ids", "bad_words", "min_tokens"}


async def test_untagged_training_calls_reach_the_server_without_ids_that_it_does_not_check(
    gateway: GatewayUnderTest,
) -> None:
    """Such as those of agent-lightning's own trainer, or of a hook of the user's."""
    rollout = await gateway.create(None)
    for options in UNCHECKED:
        answer = await gateway.call(rollout, {"messages": [user("hi")], "top_p": 0.5, **options})
        assert answer.status_code == 200
        assert not UNCHECKED_NAMES & gateway.last().body.keys() and gateway.last().body["top_p"] == 0.5


@pytest.mark.parametrize("mode", ["train", "val"])
async def test_parameters_that_hold_up_the_model_server_never_reach_it(gateway: GatewayUnderTest, mode: str) -> None:
    rollout = await gateway.create("memory")
    async with as_rollout(gateway, rollout) as agent:

        async def call(api: str = "chat/completions", **body: Any) -> httpx.Response:
            return await agent.post(f"{gateway.address(rollout, mode)}/{api}", json=body)

        for parameters, said in HOLD_UP:
            answer = await call(messages=[user("hi")], **parameters)
            assert answer.status_code == 400 and said in answer.json()["error"]["message"], said
        for part in FETCHED:
            answer = await call(messages=[user([part])])
            assert answer.status_code == 400 and "fetch no addresses" in answer.json()["error"]["message"], part
        for options in UNCHECKED:
            answer = await call(messages=[user("hi")], **options)
            assert answer.status_code == (200 if mode == "train" else 400), options
        before = len(gateway.model.requests())
        answer = await call("completions", prompt=["a"] * 9)
        assert answer.status_code == 400 and "of 9 prompts" in answer.json()["error"]["message"]
        for prompt in ([5, -1], [[5], [5, -1.0]]):
            answer = await call("completions", prompt=prompt)
            assert answer.status_code == 400 and "is negative" in answer.json()["error"]["message"]
        item = {"role": "user", "content": [{"type": "input_image", "image_url": "http://a.test/a.png"}]}
        assert (await call("responses", input=[item])).status_code == 400
        assert len(gateway.model.requests()) == before == (len(UNCHECKED) if mode == "train" else 0)
        assert gateway.model.requests("/v1/completions") == []
        assert not any(UNCHECKED_NAMES & seen.body.keys() for seen in gateway.model.requests())
        plain = await call(messages=[user("hi")], tools=[], stop=["\n"], n=1)
        assert plain.status_code == 200
    refused = len(HOLD_UP) + len(FETCHED) + 4 + (0 if mode == "train" else len(UNCHECKED))
    assert (await counted(gateway))["empo2/refused/parameters"] == refused


@contextmanager
def served(descriptors: int, seconds: float) -> Iterator[int]:
    """A server that admits whoever asks for ``/in``."""

    async def enter(request: Any) -> PlainTextResponse:
        getattr(request.state, ADMIT)()
        return PlainTextResponse("in")

    async def see(_: Any) -> PlainTextResponse:
        return PlainTextResponse("seen")

    app = Starlette(routes=[Route("/in", enter), Route("/", see)])
    listener = socket.create_server(("127.0.0.1", 0))
    protocol: Any = protocol_with_room(descriptors, seconds)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def connected(port: int, *lines: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall("".join(f"{line}\r\n" for line in lines).encode())
    return connection


def answered(connection: socket.socket) -> bytes:
    """The body of one whole answer: uvicorn may send it in a packet after the headers'."""
    with HTTPResponse(connection) as answer:
        answer.begin()
        assert answer.status == 200
        return answer.read()


def is_closed(connection: socket.socket) -> bool:
    return connection.recv(65_536) == b""


def test_headers_that_never_end_are_not_waited_for() -> None:
    with served(1000, 2) as port, ExitStack() as open_:
        known = open_.enter_context(connected(port, "GET /in HTTP/1.1", "Host: a", ""))
        assert answered(known) == b"in"
        silent = open_.enter_context(connected(port))
        half = open_.enter_context(connected(port, "GET / HTTP/1.1", "Host: a"))
        again = open_.enter_context(connected(port, "GET / HTTP/1.1", "Host: a", ""))
        assert answered(again) == b"seen"
        again.sendall(b"GET / HTTP/1.1\r\nHost")  # the next request on a connection, too
        begin = time.monotonic()
        assert is_closed(silent) and is_closed(half) and is_closed(again)
        assert time.monotonic() - begin < 10
        known.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answered(known) == b"seen"


def test_strangers_leave_room_for_those_with_a_key() -> None:
    with served(256 + 40, 60) as port, ExitStack() as open_:
        known = [open_.enter_context(connected(port, "GET /in HTTP/1.1", "Host: a", "")) for _ in range(30)]
        assert all(answered(each) == b"in" for each in known)
        strangers = [open_.enter_context(connected(port)) for _ in range(100)]
        assert all(is_closed(each) for each in strangers[:80])
        late = open_.enter_context(connected(port, "GET /in HTTP/1.1", "Host: a", ""))
        for each in [*known, late]:
            each.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answered(late) == b"in" and all(answered(each) == b"seen" for each in known)


async def test_a_valid_key_admits_a_connection_and_a_wrong_one_does_not() -> None:
    admitted: list[str] = []

    async def forward(_: Request) -> Response:
        return Response()

    check = partial(check_key, Keys(agent="agents", admin="admin"), StepMetrics())
    for key in ("", "wrong", "agents", "admin"):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/api/rollouts", "headers": headers}
        scope["state"] = {ADMIT: lambda key=key: admitted.append(key)}
        await check(Request.of(scope, None), forward)  # pyright: ignore[reportArgumentType]
        await check(Request.of(scope | {"path": "/healthz"}, None), forward)  # pyright: ignore[reportArgumentType]
    assert admitted == ["agents", "admin"]


@pytest.mark.rare
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("hard", "agents"), [(8192, 512), (1024, 128)])
async def test_idle_strangers_at_the_common_limit_stop_no_agent(tmp_path: Path, hard: int, agents: int) -> None:
    """The gateway's process begins with 1,024 descriptors. Each call takes two of them, and all are open at once."""
    raise_descriptor_limit()  # of this process, which has both ends
    model = ModelServer(delay=lambda path, body: 3)
    with ExitStack() as open_:
        open_.enter_context(model.serve())
        listener = open_.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        command = [sys.executable, "-m", "empo2.recipe.cli", "gateway", "--profile", "cpu", "--fd"]
        gateway = subprocess.Popen(
            [*command, str(listener.fileno()), "--memory", str(tmp_path / "memory.sqlite")],
            env={**os.environ, ADMIN_KEY: ADMIN, KEY: AGENT_KEY},
            pass_fds=(listener.fileno(),),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard)),
        )
        open_.callback(gateway.wait)
        open_.callback(gateway.terminate)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with as_trainer(url) as client:
            (await client.post("/api/models", json=[{"model": MODEL, "endpoint": model.url}])).raise_for_status()
            created = (await client.post("/api/rollouts", json=[{"input": {}}] * agents)).raise_for_status().json()
            strangers = [open_.enter_context(connected(listener.getsockname()[1])) for _ in range(1189)]
            addresses = [f"/proxy/rollout/{each['rollout_id']}/attempt/0/mode/train/openai/v1" for each in created]
            body = {"messages": [user("hi")], "max_tokens": 2}
            calls = [client.post(f"{address}/chat/completions", json=body) for address in addresses]
            answers = await asyncio.gather(*calls)
        assert Counter(answer.status_code for answer in answers) == {200: agents}
        assert len(strangers) == 1189 and gateway.poll() is None
