"""Record one episode of an agent against agent-lightning's real gateway with a scripted model behind it."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import httpx
import structlog
import uvicorn
from agentlightning.schemas import DEFAULT_ATTEMPT_ID
from agentlightning.server.app import create_app
from fastapi import FastAPI, Request, Response

from empo2.agents.process_guard import guarded
from empo2.recipe.config import Settings
from empo2.recipe.retrofit.scripted_model import Body, answer_choice
from empo2.recipe.retrofit.upstream import agent_variables, worker_command

_MODEL = "policy"
_CALL = re.compile(r"/proxy/rollout/[^/]+/attempt/[^/]+/mode/[^/]+/openai/v1/(.*)")
_EVENTS = re.compile(r"/api/rollouts/[^/]+/attempt/[^/]+/events")
# Long enough for parallel calls to overlap.
_REPLY_SECONDS = 0.2
_OUTPUT_CHARACTERS = 20_000


@dataclass
class Call:
    """One request on the rollout's address, and its answer.

    Attributes:
        path: relative to the address, such as ``chat/completions``.
        parallel: True if it came while another request was still open.
        status: HTTP status; 0 if the agent did not wait for the answer.
    """

    path: str
    body: Body
    parallel: bool
    status: int = 0
    answer: Body = field(default_factory=dict)


@dataclass
class Trace:
    """The record of an episode.

    Attributes:
        events: type and data of each, in order.
        refused_events: status and answer of each.
        exit_code: None after the time limit.
        output: what the agent wrote to stdout and stderr, its end.
    """

    calls: list[Call] = field(default_factory=list)
    events: list[tuple[str, Body]] = field(default_factory=list)
    refused_events: list[tuple[int, str]] = field(default_factory=list)
    exit_code: int | None = None
    output: str = ""


def record(
    settings: Settings,
    task: Body,
    replies: Sequence[str],
    time_limit: float,
    server: tuple[str, str] | None = None,
) -> Trace:
    """Run the agent of ``settings`` once on ``task``, as agent-lightning's local controller does.

    Args:
        replies: the model's replies, in order; the last one is repeated. If tools are offered, each is first called
            once, with arguments made from its schema.
        time_limit: seconds; then the agent and its descendants are killed.
        server: address of an OpenAI-compatible server, and its name of the model, which then replies instead.

    Raises:
        ConfigError: ``agent.env`` names a field that the task does not have.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    variables = agent_variables(task, settings.agent.env)
    trace, key = Trace(), secrets.token_urlsafe(16)
    endpoint, model = server or (None, _MODEL)
    with _serving(_gateway(trace, key, replies, model)) as url:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            client.post(
                "/api/models", json=[{"model": model, "endpoint": endpoint or f"{url}/model"}]
            ).raise_for_status()
            rollout = client.post("/api/rollouts", json=[{"input": task}]).raise_for_status().json()[0]["rollout_id"]
            attempt = f"rollout/{rollout}/attempt/{DEFAULT_ATTEMPT_ID}"
            addresses = {
                "AGL_KEY": key,
                "AGL_OPENAI_BASE_URL": f"{url}/proxy/{attempt}/mode/train/openai/v1",
                "AGL_EVENT_URL": f"{url}/api/{attempt.replace('rollout/', 'rollouts/', 1)}/events",
            }
            _run(settings.agent.name, {**os.environ, **addresses, **variables}, time_limit, trace)
            events = client.get(f"/api/rollouts/{rollout}/events").raise_for_status().json()
            trace.events = [(event["event_type"], event["data"]) for event in events]
            client.delete(f"/api/rollouts/{rollout}")
            client.delete("/api/models")
    return trace


def _run(agent_class: str, environment: dict[str, str], time_limit: float, trace: Trace) -> None:
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            guarded(worker_command(agent_class)),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        with process, contextlib.suppress(subprocess.TimeoutExpired):  # ends when its pipe is closed
            trace.exit_code = process.wait(time_limit)
        output.seek(0)
        trace.output = output.read().decode(errors="replace")[-_OUTPUT_CHARACTERS:]


def _gateway(trace: Trace, key: str, replies: Sequence[str], model_name: str) -> FastAPI:
    """Return agent-lightning's app; the scripted model is a route of the same app."""
    temperatures = {mode: {"temperature": 1.0} for mode in ("train", "val")}
    app = create_app({"key": key, "default_proxy": {"model_name": model_name, **temperatures}})
    script, open_calls = chain(replies, repeat(replies[-1])), set()

    @app.middleware("http")
    async def record_call(request: Request, call_next: Any) -> Response:
        path = request.url.path
        match = _CALL.fullmatch(path)
        if not match and not (request.method == "POST" and _EVENTS.fullmatch(path)):
            return await call_next(request)
        call = Call(match[1] if match else "", _json_object(await request.body()), parallel=bool(open_calls))
        if match:
            trace.calls.append(call)
            open_calls.add(id(call))
        try:
            response = await call_next(request)
            content = b"".join([chunk async for chunk in response.body_iterator])
        finally:
            open_calls.discard(id(call))
        call.status, call.answer = response.status_code, _json_object(content)
        if not match and call.status >= 400:
            trace.refused_events.append((call.status, content.decode(errors="replace")))
        return Response(content, response.status_code, dict(response.headers))

    @app.post("/model/{path:path}")
    async def model(path: str, body: Body) -> Body:
        await asyncio.sleep(_REPLY_SECONDS)
        choices = [
            {"index": index, "finish_reason": "stop", "token_ids": [1], **answer_choice(body, script)}
            for index in range(body.get("n") or 1)
        ]
        kind = "chat.completion" if path == "chat/completions" else "text_completion"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "1", "object": kind, "created": 0, "model": _MODEL, "choices": choices, "usage": usage}

    return app


def _json_object(content: bytes) -> Body:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _serving(app: FastAPI) -> Iterator[str]:
    """Serve the app in a thread on a free port of 127.0.0.1; yield its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
