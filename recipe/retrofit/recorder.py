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
from fastapi.responses import JSONResponse

from empo2.agents.process_guard import guarded
from empo2.recipe.config import Gateway, Settings
from empo2.recipe.gateway.dialects.translator import Translator
from empo2.recipe.gateway.serve.models import model_routes
from empo2.recipe.gateway.stages.guard import RequestGuard
from empo2.recipe.gateway.stages.trained_calls import choice_of
from empo2.recipe.retrofit.agent_worker import agent_variables, worker_command
from empo2.recipe.retrofit.scripted_model import Body, answer_choice

_MODEL = "policy"
_CALL = re.compile(r"/proxy/rollout/[^/]+/attempt/[^/]+/mode/[^/]+/openai/v1/(.*)")
_RECORD = "empo2.call"  # in the ASGI scope: the `Call` of a request
_EVENTS = re.compile(r"/api/rollouts/[^/]+/attempt/[^/]+/events")
_EMBEDDING = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.0] * 8}],
    "model": _MODEL,
    "usage": {"prompt_tokens": 1, "total_tokens": 1},
}
# Long enough for parallel calls to overlap.
_REPLY_SECONDS = 0.2
_OUTPUT_CHARACTERS = 20_000
_POLL_SECONDS = 0.2


@dataclass
class Call:
    """One request on the rollout's address, and its answer.

    Attributes:
        path: relative to the address, such as ``chat/completions``; of a translated request, that which it became.
        body: as the model server gets it, as is ``answer``.
        parallel: True if it came while another request was still open.
        asked: the path that the agent asked for, such as ``responses``; "" for ``path``.
        streamed: True if the agent asked for a stream.
        trained: False if it passes to another server than the policy's, or is not to be trained.
        status: HTTP status; 0 if the agent did not wait for the answer.
    """

    path: str
    body: Body
    parallel: bool
    status: int = 0
    answer: Body = field(default_factory=dict)
    asked: str = ""
    streamed: bool = False
    trained: bool = True


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
    *,
    first_call_only: bool = False,
) -> Trace:
    """Run the agent of ``settings`` once on ``task``, as agent-lightning's local controller does.

    Args:
        replies: the model's replies, in order; the last one is repeated. If tools are offered, each is first called
            once, with arguments made from its schema.
        time_limit: seconds; then the agent and its descendants are killed.
        server: address of an OpenAI-compatible server, and its name of the model, which then replies instead.
        first_call_only: kill the agent once a call has been answered.

    Raises:
        ConfigError: ``agent.env`` names a field that the task does not have.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    variables = agent_variables(task, settings.agent.env)
    trace, key = Trace(), secrets.token_urlsafe(16)
    endpoint, model = server or (None, _MODEL)
    with _serving(_gateway(trace, key, replies, model, settings.gateway)) as url:
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
            environment = {**os.environ, **addresses, **variables}
            _run(settings.agent.name, environment, time_limit, trace, first_call_only=first_call_only)
            events = client.get(f"/api/rollouts/{rollout}/events").raise_for_status().json()
            trace.events = [(event["event_type"], event["data"]) for event in events]
            client.delete(f"/api/rollouts/{rollout}")
            client.delete("/api/models")
    return trace


def _run(
    agent_class: str, environment: dict[str, str], time_limit: float, trace: Trace, *, first_call_only: bool
) -> None:
    end = time.monotonic() + time_limit
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            guarded(worker_command(agent_class)),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        with process:  # ends when its pipe is closed
            while trace.exit_code is None and time.monotonic() < end:
                if first_call_only and any(call.status for call in trace.calls):
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    trace.exit_code = process.wait(_POLL_SECONDS)
        output.seek(0)
        trace.output = output.read().decode(errors="replace")[-_OUTPUT_CHARACTERS:]


def _gateway(trace: Trace, key: str, replies: Sequence[str], model_name: str, settings: Gateway) -> FastAPI:
    """Return agent-lightning's app behind our gateway's translation; the scripted model is a route of the same app."""
    max_bytes, trained = int(settings.max_request * 2**20), choice_of(settings.trained_calls)
    temperatures = {mode: {"temperature": 1.0} for mode in ("train", "val")}
    app = create_app({"key": key, "default_proxy": {"model_name": model_name, **temperatures}})
    app.include_router(model_routes(model_name))
    script, open_calls = chain(replies, repeat(replies[-1])), set()

    @app.middleware("http")
    async def record_translated(request: Request, call_next: Any) -> Response:
        call: Call | None = request.scope.get(_RECORD)
        match = _CALL.fullmatch(request.url.path)
        if call is None or match is None:
            return await call_next(request)
        call.path, call.body = match[1], _json_object(await request.body())
        response = await call_next(request)
        content = b"".join([chunk async for chunk in response.body_iterator])
        call.answer = _json_object(content)
        return Response(content, response.status_code, dict(response.headers))

    app.add_middleware(Translator, max_bytes=max_bytes)
    app.add_middleware(RequestGuard, max_bytes=max_bytes)

    @app.middleware("http")
    async def record_call(request: Request, call_next: Any) -> Response:
        path = request.url.path
        match = _CALL.fullmatch(path)
        if request.method != "POST" or not (match or _EVENTS.fullmatch(path)):
            return await call_next(request)
        asked, body = match[1] if match else "", _json_object(await request.body())
        if asked.endswith("messages/count_tokens"):  # Anthropic's; the gateway counts, and leaves no trace
            return JSONResponse({"input_tokens": 1})
        call = Call(asked, body, parallel=bool(open_calls), asked=asked, streamed=bool(body.get("stream")))
        if match:
            if asked == "embeddings" and settings.other_server is not None:
                call.status, call.trained = 200, False
                trace.calls.append(call)
                return JSONResponse(_EMBEDDING)
            call.trained = trained is None or trained(asked.removeprefix("v1/"), request.headers, body)
            request.scope[_RECORD] = call
            trace.calls.append(call)
            open_calls.add(id(call))
        try:
            response = await call_next(request)
            content = b"".join([chunk async for chunk in response.body_iterator])
        finally:
            open_calls.discard(id(call))
        call.status = response.status_code
        call.answer = call.answer or _json_object(content)
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
