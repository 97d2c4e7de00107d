"""What reads a request for all stages of the gateway, and the order in which they act."""

import json
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from empo2.recipe.gateway.pipeline import Pipeline
from empo2.recipe.gateway.request import Request, Stage

BASE = "/proxy/rollout/r/attempt/1/mode/train/openai/v1"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def request(method: str, path: str) -> Request:
    sent = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        return sent.pop() if sent else {"type": "http.disconnect"}

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    return Request.of(scope, receive)


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
