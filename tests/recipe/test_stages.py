"""Each stage of the gateway's pipeline alone, without a server; and what reads a request for all of them."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from empo2.recipe.config import load_settings
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.pipeline import Pipeline
from empo2.recipe.gateway.request import Answer, Request, Stage
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.access import KeyCheck
from empo2.recipe.gateway.stages.dialect import Dialects
from empo2.recipe.gateway.stages.form import Form
from empo2.recipe.gateway.stages.gate import Gated, PolicyGate
from empo2.recipe.gateway.stages.untrained import UntrainedCalls
from empo2.recipe.gateway.tokens.tokenizer import EstimatedTokenizer
from empo2.recipe.protocol import Keys

BASE = "/proxy/rollout/r/attempt/1/mode/train/openai/v1"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"id": "1", "created": 0, "model": "m", "choices": [{"index": 0, "message": {"content": "yes"}}]}


def request(method: str, path: str, body: Any = None, key: str = "", query: bytes = b"") -> Request:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    content = b"" if body is None else json.dumps(body).encode()
    sent = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        return sent.pop() if sent else {"type": "http.disconnect"}

    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": headers}
    return Request.of(scope, receive)


class App:
    """The rest of the way: keeps the request that comes, and answers."""

    def __init__(self, answer: Any = None) -> None:
        self.seen: list[Request] = []
        self._answer = answer or {}

    async def __call__(self, request: Request) -> Response:
        self.seen.append(request)
        return Answer(json.dumps(self._answer), 200)


@pytest.mark.parametrize(
    ("path", "kind", "rollout", "attempt", "api"),
    [
        (f"{BASE}/chat/completions", "call", "r", "1", "chat/completions"),
        (f"{BASE}/v1/messages", "call", "r", "1", "messages"),  # as Anthropic's clients ask
        (f"{BASE}/v1/models/gpt/4", "call", "r", "1", "models/gpt/4"),
        ("/api/rollouts", "rollouts", "", "", ""),
        ("/api/rollouts/r", "rollout", "r", "", ""),
        ("/api/rollouts/r/events", "events", "r", "", ""),
        ("/api/rollouts/r/attempt/1/events", "attempt events", "r", "1", ""),
        ("/api/rollouts/r/attempt/1", "", "", "", ""),
        (BASE.replace("train", "test") + "/chat/completions", "", "", "", ""),
        ("/empo2/drain", "", "", "", ""),
    ],
)
def test_a_path_is_read_once(path: str, kind: str, rollout: str, attempt: str, api: str) -> None:
    read = request("POST", path)
    assert (read.kind, read.rollout_id, read.attempt_id, read.api) == (kind, rollout, attempt, api)


async def test_the_app_gets_the_body_and_then_what_the_client_still_sends() -> None:
    changed = request("POST", f"{BASE}/v1/messages").with_body(CHAT, "chat/completions")
    scope, receive = changed.for_app()
    assert scope["path"] == f"{BASE}/chat/completions" and scope["raw_path"] == scope["path"].encode()
    first = await receive()
    assert json.loads(first["body"]) == CHAT
    assert (b"content-length", str(len(first["body"])).encode()) in scope["headers"]
    assert (await receive())["type"] == "http.request" and (await receive())["type"] == "http.disconnect"


async def test_stages_act_in_their_order_and_answers_come_back_in_the_opposite_one() -> None:
    order: list[str] = []

    def stage(name: str) -> Stage:
        async def act(request: Request, forward: Any) -> Response:
            order.append(f"{name} in")
            answer = await forward(request)
            order.append(f"{name} out")
            return answer

        return act

    async def app(scope: Any, receive: Any, send: Any) -> None:
        order.append("app")
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-app", b"yes")]})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        await send({"type": "http.response.body", "body": b"}"})

    pipeline = Pipeline(app, [stage("first"), stage("second")])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(pipeline), base_url="http://test") as client:
        answer = await client.get("/anything")
    assert order == ["first in", "second in", "app", "second out", "first out"]
    assert (answer.status_code, answer.text, answer.headers["x-app"]) == (201, "{}", "yes")


@pytest.mark.parametrize(
    ("method", "path", "query", "agent"),
    [
        ("POST", f"{BASE}/chat/completions", b"", 200),
        ("GET", f"{BASE}/models/m", b"", 200),
        ("GET", f"{BASE}/modelsx", b"", 403),
        ("PATCH", "/api/rollouts/r", b"", 200),
        ("DELETE", "/api/rollouts/r", b"", 403),
        ("GET", "/api/rollouts/r/events", b"event_type=reward", 200),
        ("GET", "/api/rollouts/r/events", b"event_type=model_request", 403),
        ("POST", "/empo2/drain", b"", 403),
    ],
)
async def test_each_key_opens_its_routes(method: str, path: str, query: bytes, agent: int) -> None:
    check, app = KeyCheck(Keys(agent="a", admin="b")), App()
    statuses = [(await check(request(method, path, key=key, query=query), app)).status_code for key in ("a", "b", "c")]
    assert statuses == [agent, 200, 401]
    assert {seen.headers["authorization"] for seen in app.seen} == {"Bearer b"}  # all that agent-lightning knows


async def test_a_form_reads_the_body_and_says_what_is_wrong_with_it() -> None:
    form, app = Form(max_bytes=100), App()
    assert (await form(request("POST", f"{BASE}/chat/completions", CHAT), app)).status_code == 200
    assert app.seen[0].body == CHAT and json.loads(app.seen[0].content or b"") == CHAT
    long = {"messages": [{"role": "user", "content": "x" * 100}]}
    for body, status in (({"messages": []}, 400), ([], 400), (long, 413)):
        answer = await form(request("POST", f"{BASE}/chat/completions", body), app)
        assert answer.status_code == status and json.loads(bytes(answer.body))["error"]["message"]
    reward = {"event_type": "reward", "data": {"value": 10**400}}
    answer = await Form(1000)(request("POST", "/api/rollouts/r/attempt/1/events", reward), app)
    assert answer.status_code == 400 and "data.value" in json.loads(bytes(answer.body))["detail"]
    assert len(app.seen) == 1


async def test_a_dialect_is_behind_its_stage_a_chat_completion() -> None:
    app = App(COMPLETION)
    asked = replace(request("POST", f"{BASE}/chat/completions"), body={**CHAT, "stream": True})
    answer = await Dialects(1000)(asked, app)
    assert answer.headers["content-type"].startswith("text/event-stream") and b"[DONE]" in answer.body
    assert app.seen[0].body == CHAT
    asked = replace(request("POST", f"{BASE}/responses"), body={"input": "hi"})
    answer = await Dialects(1000)(asked, app)
    assert json.loads(bytes(answer.body))["object"] == "response"
    assert app.seen[1].api == "chat/completions" and app.seen[1].body["messages"][-1]["role"] == "user"


async def test_untrained_calls_leave_before_the_policy_learns_of_them() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"of": "the other server"})

    settings = load_settings(
        "cpu", ["gateway.other_server=http://other/v1/", "gateway.trained_calls=[{model: policy}]"]
    )
    unused: Any = None
    services = Services(settings, unused, unused, EstimatedTokenizer(), StepMetrics(), unused)
    stage = UntrainedCalls(services, httpx.AsyncClient(transport=httpx.MockTransport(answer)))
    app = App()
    for model in ("policy", "judge"):
        body = {**CHAT, "model": model}
        await stage(request("POST", f"{BASE}/chat/completions", key="secret").with_body(body), app)
    assert [each.body["model"] for each in app.seen] == ["policy"]
    assert [str(each.url) for each in seen] == ["http://other/v1/chat/completions"]
    assert "authorization" not in seen[0].headers and services.metrics.counts == {"untrained_calls": 1}


async def test_a_closed_gate_holds_completions_and_nothing_else() -> None:
    gate, app = PolicyGate(), App()
    assert await gate.close(timeout=1) == (0, 0)
    held = asyncio.create_task(Gated(gate)(request("POST", f"{BASE}/completions"), app))
    await Gated(gate)(request("GET", f"{BASE}/models"), app)
    await asyncio.sleep(0)
    assert [each.api for each in app.seen] == ["models"]
    gate.open()
    await held
    assert [each.api for each in app.seen] == ["models", "completions"]
