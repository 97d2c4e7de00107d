"""Record one episode of an agent against the gateway of training, with a scripted model behind it."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import starlette.requests
import structlog
import uvicorn
from agentlightning.schemas import DEFAULT_ATTEMPT_ID
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from empo2.agents import process_guard
from empo2.agents.process_guard import guarded
from empo2.recipe.config import Settings
from empo2.recipe.controller.agent_process import ALONE
from empo2.recipe.files.tasks import agent_variables
from empo2.recipe.gateway.app import make_gateway
from empo2.recipe.gateway.memory import open_memory
from empo2.recipe.gateway.normal_form import LEFT_OUT
from empo2.recipe.gateway.pipeline import Pipeline
from empo2.recipe.gateway.request import Answer, Next, Request
from empo2.recipe.gateway.server_client import CALL_SECONDS
from empo2.recipe.messages import is_beside
from empo2.recipe.network import LOOPBACK, bind, direct
from empo2.recipe.protocol import Keys
from empo2.recipe.retrofit.scripted_model import Body, Script, embeddings

_MODEL = "policy"
_RECORD = "empo2.call"  # in the ASGI scope: the `Call` of a request
_HUNG_UP = 499  # what agent-lightning answers to a client that is gone
# Long enough for parallel calls to overlap.
_REPLY_SECONDS = 0.2
_POLL_SECONDS = 0.2
_TRACEBACK_SECONDS = 2  # to write where it is


@dataclass
class Call:
    """One request on the rollout's address, and its answer."""

    path: str  # relative to the address, such as ``chat/completions``; of a translated request, that which it became
    body: Body  # as the agent meant it, translated; empty if it was refused or passed to another server
    begun: float = 0.0  # when it came, Unix time
    ended: float = 0.0  # when it was answered
    status: int = 0  # HTTP status; 0 if the agent did not wait for the answer
    answer: Body = field(default_factory=dict)  # to the body
    asked: str = ""  # the path that the agent asked for, such as ``responses``; "" for ``path``
    streamed: bool = False  # True if the agent asked for a stream
    trained: bool = True  # False if it is not to be trained, by ``gateway.trained_calls``, or for embeddings
    # Names of header lines before its system message, which are no part of the prompt.
    left_out: list[str] = field(default_factory=list)


@dataclass
class Trace:
    """The record of an episode."""

    calls: list[Call] = field(default_factory=list)
    events: list[Body] = field(default_factory=list)  # as agent-lightning returns them, in order
    refused_events: list[tuple[int, str]] = field(default_factory=list)  # status and answer of each
    exit_code: int | None = None  # None after the time limit
    output: str = ""  # what the agent wrote to stdout and stderr
    address: str = ""  # that it was given
    scripted: bool = False  # True if a script replied


def record(
    settings: Settings,
    task: Body,
    replies: Sequence[str],
    time_limit: float,
    server: tuple[str, str] | None = None,
    *,
    first_call_only: bool = False,
) -> Trace:
    """Run the agent of ``settings`` once on ``task``, as the controller does.

    Args:
        replies: the model's, as `Script` takes them.
        time_limit: seconds; then the agent and its descendants are killed.
        server: address of an OpenAI-compatible server, and its name of the model, which then replies instead.
            Embeddings are made up, unless ``gateway.other_server`` is there for them.
        first_call_only: kill the agent once a call has been answered that cannot stand beside its main chat.

    Raises:
        ConfigError: as `agent_variables`.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    variables = agent_variables(task, settings.agent.env)
    trace, keys = Trace(scripted=server is None), Keys(agent=secrets.token_urlsafe(16), admin=secrets.token_urlsafe(16))
    own = settings.gateway
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scripted = stack.enter_context(serving(_scripted(Script(replies), own.other_server)))
        endpoint, model = server or (scripted, _MODEL)
        # A script answers judges, too. Without a server for them, the other one would get all that is not trained.
        other = own.other_server if server else own.other_server and scripted
        other = other or (None if own.trained_calls else scripted)
        url = stack.enter_context(serving(_gateway(trace, settings, keys, model, other, folder)))
        headers = {"Authorization": f"Bearer {keys.admin}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            client.post("/api/models", json=[{"model": model, "endpoint": endpoint}]).raise_for_status()
            rollout = client.post("/api/rollouts", json=[{"input": task}]).raise_for_status().json()[0]["rollout_id"]
            attempt = f"rollout/{rollout}/attempt/{DEFAULT_ATTEMPT_ID}"
            addresses = {
                "AGL_KEY": keys.of_rollout(rollout),
                "AGL_OPENAI_BASE_URL": f"{url}/proxy/{attempt}/mode/train/openai/v1",
                "AGL_EVENT_URL": f"{url}/api/{attempt.replace('rollout/', 'rollouts/', 1)}/events",
            }
            trace.address = addresses["AGL_OPENAI_BASE_URL"]
            environment = {**os.environ, **direct(url), **addresses, **variables}
            _run(settings.agent.name, environment, time_limit, trace, first_call_only=first_call_only)
            trace.events = client.get(f"/api/rollouts/{rollout}/events").raise_for_status().json()
            client.delete(f"/api/rollouts/{rollout}")
            client.delete("/api/models")
    return trace


def _run(
    agent_class: str, environment: dict[str, str], time_limit: float, trace: Trace, *, first_call_only: bool
) -> None:
    end = time.monotonic() + time_limit
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            guarded([sys.executable, "-c", ALONE, agent_class]),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        with process:  # ends when its pipe is closed
            while trace.exit_code is None and time.monotonic() < end:
                if first_call_only and any(call.status and not is_beside(call.body) for call in trace.calls):
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    trace.exit_code = process.wait(_POLL_SECONDS)
            if trace.exit_code is None and not first_call_only:
                _interrupt(process.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TRACEBACK_SECONDS)
        output.seek(0)
        trace.output = output.read().decode(errors="replace")


def _interrupt(pid: int) -> None:
    """Interrupt the programs that a process has started: Python writes then where it was."""
    started = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(pid).children(recursive=True)
    for each in started:
        with contextlib.suppress(psutil.Error):  # one may end meanwhile
            if not each.children() and process_guard.__file__ not in each.cmdline():
                each.send_signal(signal.SIGINT)


def _scripted(script: Script, embedder: str | None) -> ASGIApp:
    """Return a model server whose replies are given; embeddings are those of ``embedder``, or made up."""
    app = FastAPI()

    @app.post("/{path:path}")
    async def answer(path: str, request: starlette.requests.Request) -> Response:
        content = await request.body()
        if path.endswith("embeddings") and embedder:
            kept = ("authorization", "content-type")
            headers = {name: value for name, value in request.headers.items() if name in kept}
            async with httpx.AsyncClient(timeout=CALL_SECONDS, trust_env=False) as client:
                told = await client.post(f"{embedder.rstrip('/')}/embeddings", content=content, headers=headers)
            return Response(told.content, told.status_code, media_type=told.headers.get("content-type"))
        body = json.loads(content)
        if path.endswith("embeddings"):
            return JSONResponse(embeddings(body))
        if path.endswith("tokenize"):
            return JSONResponse({"tokens": [1]})
        await asyncio.sleep(_REPLY_SECONDS)
        try:
            choices = [
                {"index": index, "finish_reason": "stop", "token_ids": [1], **script.choice(body)}
                for index in range(body.get("n") or 1)
            ]
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # vLLM refuses it, too
            said = f"the request is not as OpenAI's API has it: {type(error).__name__}: {error}"
            return JSONResponse({"error": {"message": said, "type": "BadRequestError", "code": 400}}, 400)
        kind = "chat.completion" if path.endswith("chat/completions") else "text_completion"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return JSONResponse(
            {"id": "1", "object": kind, "created": 0, "model": _MODEL, "choices": choices, "usage": usage}
        )

    return app


def _gateway(
    trace: Trace, settings: Settings, keys: Keys, model: str, other_server: str | None, folder: Path
) -> ASGIApp:
    """Return the gateway of a training run, with a memory that is off, and with what fills the trace around it."""
    algorithm = settings.algorithm.model_copy(update={"name": "grpo"})
    # A script's replies have no tokens.
    gateway = settings.gateway.model_copy(update={"cumulative_tokens": False, "other_server": other_server})
    # As an external server's: no tokenizer of the model is looked for.
    served = settings.model.model_copy(update={"server": "http://model/v1", "temperature": 1.0})
    trial = settings.model_copy(update={"algorithm": algorithm, "gateway": gateway, "model": served})
    memory = open_memory(trial, folder / "memory.sqlite")

    async def asked(request: Request, forward: Next) -> Response:
        if request.kind == "attempt events":
            answer = await forward(request)
            if answer.status_code >= 400:
                trace.refused_events.append((answer.status_code, bytes(answer.body).decode(errors="replace")))
            return answer
        if not request.is_call or request.api == "messages/count_tokens":
            return await forward(request)
        call = Call(request.api, {}, time.time(), asked=request.api, trained=False)
        request.scope[_RECORD] = call
        trace.calls.append(call)
        answer = await forward(request)
        assert isinstance(answer, Answer)
        call.ended = time.time()
        call.status = 0 if answer.status_code == _HUNG_UP else answer.status_code
        call.trained = call.trained or call.status != 200
        call.streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
        call.answer = call.answer or answer.value or {}
        return answer

    async def translated(request: Request, forward: Next) -> Response:
        answer = await forward(request)
        if (call := request.scope.get(_RECORD)) and isinstance(answer, Answer):
            call.path, call.body, call.answer, call.trained = request.api, request.body, answer.value or {}, True
            call.left_out = request.scope.get(LEFT_OUT, [])
        return answer

    app = make_gateway(trial, model_path=model, keys=keys, folder=folder, memory=memory, watch=translated)
    return Pipeline(app, [asked])


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve the app in a thread on a free port of 127.0.0.1; yield its URL."""
    with bind(LOOPBACK, 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
