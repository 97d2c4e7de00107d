"""Recorded requests of coding agents, sent again: one training row a chat, tips that stay, side calls left out.

The model replies what the recorded chat holds, but as a model samples it: without the defaults that clients add, and
with the arguments that did not parse. tests/recipe/recorded/README.md says how the requests were made.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.gateway.dialects.anthropic_messages import AnthropicCall
from empo2.recipe.gateway.dialects.responses import ResponsesCall
from empo2.recipe.gateway.normal_form import normal
from empo2.recipe.messages import Message, is_beside, newest_observation, spoken
from empo2.recipe.retrofit.calls import call_lines
from empo2.recipe.retrofit.recorder import Call
from empo2.recipe.retrofit.rows import Told, tell

from .harness import TOOL_TEMPLATE, Body, GatewayUnderTest, is_reflection, running_gateway, trained, user
from .model_server import ModelServer

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

GATEWAY = load_settings().gateway
RECORDED = Path(__file__).parent / "recorded"
AS_BEFORE = "{as in the request before: "
_CUT = re.compile(r"(<(system-reminder)>(?:(?!</).)*\{\+\d+ chars\})\Z", re.DOTALL)  # a block whose end was cut off
TIP = "Read the test first."
TASK = "The test in test_calc.py fails."
THOUGHTS = "I look first."
# Keeps all thoughts.
THINKING = TOOL_TEMPLATE.replace(
    "{{ m.content }}", "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
)
BROKEN = '{"path": "calc.py", "old'

# Rows, side calls.
AGENTS = {
    "claude": (1, 0),
    "claude_2.1.197_title": (1, 1),
    "claude_broken_arguments": (1, 0),
    "claude_parallel": (1, 0),
    "claude_sdk": (1, 0),
    "claude_small": (1, 0),
    "claude_subagent": (2, 0),
    "claude_thinking": (1, 0),
    "cline": (1, 0),
    "cline_subagent": (2, 0),
    "cline_thinking": (1, 0),
    "codex": (1, 0),
    "codex_thinking": (1, 0),
    "kilo": (1, 0),
    "mini": (1, 0),
    "mini_broken_arguments": (3, 0),  # it leaves such a reply out of the chat, and goes on from before it
    "mini_thinking": (1, 0),
    "opencode": (1, 1),
    "opencode_broken_arguments": (1, 1),
    "opencode_subagent": (2, 1),
    "opencode_thinking": (1, 1),
    "openhands": (1, 0),
    "openhands_thinking": (1, 0),
    "pi": (1, 0),
    "pi_thinking": (1, 0),
    "qwen": (1, 0),
    "qwen_subagent": (2, 0),
    "qwen_thinking": (1, 0),
    "terminus": (1, 0),
}


def requests_of(agent: str) -> Iterator[tuple[str, Body]]:
    """Yield path and whole body of each recorded request that was answered."""
    before: dict[str, Any] = {}
    for line in (RECORDED / f"{agent}.jsonl").read_text().splitlines():
        request = json.loads(line)
        if request["status"] != 200:
            continue
        body = _closed(request["body"])
        for name in ("system", "tools"):
            body[name] = _whole(body.get(name), before.get(name))
            before[name] = body[name] or before.get(name)
        path = request["path"].removeprefix("{BASE}").partition("?")[0]
        yield path.removeprefix("/v1"), {name: value for name, value in body.items() if value is not None}


def _closed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _closed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_closed, value)]
    return _CUT.sub(r"\1\n</\2>", value) if isinstance(value, str) else value


def _whole(value: Any, before: Any) -> Any:
    if isinstance(value, str) and value.startswith(AS_BEFORE):
        return before
    if isinstance(value, list) and value and isinstance(value[0], str) and value[0].startswith(AS_BEFORE):
        same = int(value[0].removeprefix(AS_BEFORE).rstrip("}"))
        return [*before[:same], *value[1:]]
    return value


def chat_of(path: str, body: Body) -> Body:
    if path == "/messages":
        body = AnthropicCall(body, {}).body
    elif path == "/responses":
        body = ResponsesCall(body, {}).body
    return normal(body)


def _key(message: Message) -> tuple[Any, ...]:
    calls = message.get("tool_calls") or []
    return message["role"], spoken(message) if not calls else "", tuple(call["id"] for call in calls)


def replies_to(chats: Sequence[Body]) -> dict[int, Message]:
    """The reply to each chat: what the first later chat holds after it."""
    found = {}
    for place, chat in enumerate(chats):
        begin = [*map(_key, chat["messages"])]
        for later in chats[place + 1 :]:
            messages = later["messages"]
            goes_on = len(messages) > len(begin) and [*map(_key, messages[: len(begin)])] == begin
            if goes_on and messages[len(begin)]["role"] == "assistant":
                found[place] = messages[len(begin)]
                break
    return found


def as_sampled(message: Message, *, broken: bool, thinks: bool) -> Body:
    """A reply as the model wrote it, in the form of THINKING; OpenHands sends no thoughts back."""
    reply = {name: message[name] for name in ("content", "reasoning") if name in message}
    if thinks:
        reply["reasoning"] = reply.get("reasoning", THOUGHTS)
    written = (f"<think>{reply['reasoning']}</think>" if thinks else "") + (message.get("content") or "")
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = {
            name: value for name, value in json.loads(call["function"]["arguments"]).items() if name != "replace_all"
        }
        function = {"name": call["function"]["name"], "arguments": arguments}
        written += f"<call>{json.dumps(function)}"
        sampled = BROKEN if broken else json.dumps(arguments)
        calls.append({**call, "function": {"name": function["name"], "arguments": sampled}})
    return reply | {"tool_calls": calls, "written": BROKEN if broken else written}


@pytest.mark.parametrize("agent", AGENTS)
async def test_rows_tips_and_side_calls(agent: str, tmp_path: Path) -> None:
    requests = [*requests_of(agent)]
    chats = [chat_of(*request) for request in requests]
    replies = replies_to(chats)
    beside = [any(chat.get("tools") for chat in chats) and is_beside(chat) for chat in chats]
    first = beside.index(False)
    asked: list[int] = []

    def reply(body: Body) -> str | Body:
        if is_reflection(body):
            return TIP
        place = asked[-1] if asked else None
        if place is None or place not in replies:
            return "Done."
        broken = agent.endswith("broken_arguments") and place == 1
        return as_sampled(replies[place], broken=broken, thinks=agent.endswith("_thinking"))

    model = ModelServer(template=THINKING, context=200_000)
    async with running_gateway(tmp_path, "gateway.cumulative_tokens=true", model=model) as gateway:
        model.reply = reply
        begun = newest_observation(chats[first]["messages"])
        await gateway.store_tips([{"messages": [user(begun)]}], TIP)
        rollout = await gateway.create("memory", "off-policy")
        for place, (path, body) in enumerate(requests):
            asked.append(place)
            answer = await gateway.client.post(f"{gateway.address(rollout)}{path}", json=body)
            assert answer.status_code == 200, answer.text[:500]
            if place == first:
                assert TIP in gateway.model.requests()[-1].prompt
        await gateway.finish(rollout)
        rows, _, _, results = await trained(gateway, rollout, limit=100_000)
        side = (await gateway.drain())["empo2/side_calls"] + results.left_out["side_calls_dropped"]
    assert (len(rows), side) == AGENTS[agent]
    assert side == sum(beside)
    assert TASK in begun[: len("Please solve this issue: ") + len(TASK)] or agent == "terminus"


def calls_of(agent: str) -> Iterator[Call]:
    """The recorded calls as `empo2 init` sees them, one a second."""
    requests = [*requests_of(agent)]
    chats = [chat_of(*request) for request in requests]
    replies = replies_to(chats)
    for place, ((path, _), chat) in enumerate(zip(requests, chats, strict=True)):
        broken = agent.endswith("broken_arguments") and place == 1
        thinks = agent.endswith("_thinking")
        reply = as_sampled(replies[place], broken=broken, thinks=thinks) if place in replies else {"content": "Done."}
        answer = {"choices": [{"message": {"role": "assistant", **reply}}]}
        yield Call("chat/completions", chat, place, place + 0.5, 200, answer, path[1:])


@pytest.mark.parametrize("agent", AGENTS)
def test_init_tells_the_rows_that_are_trained(agent: str) -> None:
    calls = [*calls_of(agent)]
    told = tell(calls, GATEWAY)
    assert (max(each.row or 0 for each in told), sum(each.beside for each in told)) == AGENTS[agent]
    lines = [*call_lines(calls, told, "user-turns")]
    assert max(map(len, lines)) <= 100
    assert sum(line[:3].strip().isdigit() for line in lines) == len(calls)


def reasons(told: Sequence[Told]) -> dict[int, str]:
    return {number: each.why for number, each in enumerate(told, 1) if each.why}


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ("claude_subagent", {2: "another chat begins"}),
        ("qwen_subagent", {2: "another chat begins: a sub-agent"}),
        ("opencode_subagent", {1: "not trained: it stands beside the main chat", 3: "another chat begins"}),
        ("mini_broken_arguments", {3: "the model's reply is left out", 4: "the model's reply is left out"}),
    ],
)
def test_init_says_why_a_row_is_opened(agent: str, why: dict[int, str]) -> None:
    found = reasons(tell([*calls_of(agent)], GATEWAY))
    assert found.keys() == why.keys() and all(found[number].startswith(text) for number, text in why.items()), found


def test_tools_are_said_to_change_only_if_they_do() -> None:
    """The main chat of Cline goes on after its sub-agent's, which offers other tools, with one tool less."""
    calls = [*calls_of("cline_subagent")]
    fewer = calls[4].body["tools"][1:]
    gone = calls[4].body["tools"][0]["function"]["name"]
    calls[4].body["tools"] = fewer
    found = reasons(tell(calls, GATEWAY))
    assert found[2].startswith("another chat begins")
    assert found[5] == f"the tools that are offered change, and a prompt begins with them: {gone} gone"
    assert found.keys() == {2, 5}, "the calls after it go back to the row before it"


async def test_codex_as_it_is_is_not_refused(gateway: GatewayUnderTest) -> None:
    """With its namespace of tools and its web search; the server of the recording refused both."""
    (line,) = (RECORDED / "codex_default.jsonl").read_text().splitlines()
    rollout = await gateway.create()
    answer = await gateway.client.post(f"{gateway.address(rollout)}/responses", json=json.loads(line)["body"])
    assert answer.status_code == 200
