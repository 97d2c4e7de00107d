"""Episodes that would go on without end are ended, and calls that compact a chat are their own choice."""

from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.messages import is_compaction

from .harness import BLOCK, ROOMS, TOOL_TEMPLATE, Body, GatewayUnderTest, assistant, running_gateway, trained, user
from .model_server import ModelServer, tokenizer

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKED: Body = {
    "chat/completions": {"messages": [user("go")], "max_tokens": 8},
    "responses": {"input": "go", "max_output_tokens": 8},
    "messages": {"messages": [user("go")], "max_tokens": 8, "model": "any"},
}
SUMMARIZE = {
    "claude": ({}, "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."),
    "codex": ({}, "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."),
    "qwen": ({"system": "You are the component that summarizes a conversation.", "tools": None}, "First, reason."),
    "opencode": ({"system": "You are a context summarization agent.", "tools": None, "alone": True}, "Here it is: a."),
}


def chat_of(agent: str, *before: Body) -> Body:
    more, ask = SUMMARIZE[agent]
    system = {"role": "system", "content": more.get("system", "You code.")}
    messages = [system, *(() if more.get("alone") else before), user(ask)]
    return {"messages": messages, "max_tokens": 8} | ({} if "tools" in more else {"tools": [LOOK]})


@pytest.mark.parametrize("path", ASKED)
async def test_an_episode_ends_at_its_most_calls(tmp_path: Path, path: str) -> None:
    async with running_gateway(tmp_path, "agent.most_calls=3") as gateway:
        for mode in ("memory", None):
            rollout = await gateway.create(mode)
            url = f"{gateway.address(rollout)}/{path}"
            answers = [await gateway.client.post(url, json=ASKED[path]) for _ in range(5)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 400]
            error = answers[-1].json()["error"]
            assert "the episode has ended: it has made agent.most_calls=3 calls" in error["message"]
            assert ("type" in answers[-1].json()) == (path == "messages")
        assert len(gateway.model.requests()) == 6
        assert (await gateway.drain())["empo2/episodes_ended/most_calls"] == 2


@pytest.mark.parametrize("summary_fits", [True, False])
@pytest.mark.parametrize("agent", ["qwen", "opencode"])
async def test_an_agent_that_compacts_without_end_is_ended(tmp_path: Path, agent: str, summary_fits: bool) -> None:
    """As Qwen Code and OpenCode do where what is left does not fit either: 198 requests a minute, measured."""
    model = ModelServer(template=TOOL_TEMPLATE)
    async with running_gateway(tmp_path, model=model) as gateway:
        rollout = await gateway.create("memory")
        main = {"messages": [{"role": "system", "content": "You code."}, user("fix it")], "tools": [LOOK]}
        assert (await gateway.call(rollout, main)).status_code == 200
        last = None
        model.fault = lambda path, body: setattr(
            model, "context", 8192 if summary_fits and is_compaction(body, with_tools=True) else 3
        )
        for number in range(200):  # the chat grows, is refused, and is compacted
            main = {**main, "messages": [*main["messages"], assistant("ok"), user(f"{number}")]}
            last = await gateway.call(rollout, main)
            if "has ended" in last.text:
                break
            assert last.status_code == 400
            last = await gateway.call(rollout, chat_of(agent, *main["messages"][1:]))
            main["messages"] = [*main["messages"][:1], user("a summary")]
        assert last is not None and last.status_code == 400
        assert "the episode has ended: its chat has outgrown the model again" in last.json()["error"]["message"]
        metrics = await gateway.drain()
    assert metrics["empo2/episodes_ended/too_long"] == 1
    # After the first call two refusals with a summary between them, or eight in a row.
    assert metrics["empo2/calls"] == (1 + 3 if summary_fits else 1 + 8)


async def test_an_agent_that_plays_on_between_its_compactions_is_not_ended(gateway: GatewayUnderTest) -> None:
    rollout, answers = await gateway.create("no-memory"), []
    for context in [*[8192] * 9, 3] * 4:
        gateway.model.context = context
        answers.append((await gateway.call(rollout, {**ROOMS[0], "max_tokens": 4})).status_code)
    assert answers == [*[200] * 9, 400] * 4


async def test_an_agent_that_compacts_once_goes_on(gateway: GatewayUnderTest) -> None:
    """Qwen Code asks for its summary twice: the first form does not fit either."""
    rollout = await gateway.create("no-memory")
    for context, status in ((8192, 200), (3, 400), (3, 400), (8192, 200), (8192, 200)):
        gateway.model.context = context
        assert (await gateway.call(rollout, {**ROOMS[0], "max_tokens": 4})).status_code == status


@pytest.mark.parametrize("choice", ["trained", "untrained"])
@pytest.mark.parametrize("agent", SUMMARIZE)
async def test_a_call_that_compacts_is_trained_by_choice(tmp_path: Path, agent: str, choice: str) -> None:
    """Without tips and visits of its own; earlier turns keep their tips, so that the main row goes on."""
    model = ModelServer(template=TOOL_TEMPLATE)
    async with running_gateway(tmp_path, f"gateway.compaction={choice}", model=model) as gateway:
        begin: list[Any] = [{"role": "system", "content": "You code."}, user("a dark room")]
        await gateway.store_tips([{"messages": begin}], "Take the lamp first.")
        gateway.model.reply = lambda body: "ok"
        rollout = await gateway.create("memory", "on-policy")
        calls = [{"messages": begin, "tools": [LOOK], "max_tokens": 8}, chat_of(agent, begin[1], assistant("ok"))]
        for body in calls:
            assert (await gateway.call(rollout, body)).status_code == 200
        shown = tokenizer().decode(gateway.last().prompt_ids).count(BLOCK)
        events = await gateway.calls(rollout)
        await gateway.finish(rollout)
        rows = len((await trained(gateway, rollout))[0])
        counted = (await gateway.drain())["empo2/compaction_calls"]
    extends = choice == "trained" and agent in ("claude", "codex")
    assert [call.get("visits") for call in events][1:] == ([None] if choice == "trained" else [])
    assert (rows, shown, counted) == (1 if extends or choice == "untrained" else 2, extends, 1)


@pytest.mark.parametrize("agent", SUMMARIZE)
async def test_a_validation_shows_no_tips_in_a_summary(tmp_path: Path, agent: str) -> None:
    """As in training, where it has no state."""
    async with running_gateway(tmp_path, model=ModelServer(template=TOOL_TEMPLATE)) as gateway:
        begin: list[Any] = [{"role": "system", "content": "You code."}, user("a dark room")]
        ask = chat_of(agent, begin[1], assistant("go 0"))
        await gateway.store_tips([{"messages": begin}, {"messages": ask["messages"][-1:]}], "Take the lamp first.")
        rollout = await gateway.create("memory", read_only=True)
        assert (await gateway.call(rollout, {"messages": begin, "tools": [LOOK], "max_tokens": 8})).status_code == 200
        assert BLOCK in gateway.last().prompt
        assert (await gateway.call(rollout, ask)).status_code == 200
        assert gateway.last().body["messages"][-1] == ask["messages"][-1]


@pytest.mark.parametrize(
    "messages",
    [
        [user("Summarize this conversation between two players.")],  # a task
        [user("a"), assistant("b"), user("The session was summarised badly? No: go north.")][:2],
        [user("Summarize the chat."), assistant("look"), {"role": "tool", "tool_call_id": "1", "content": "a room"}],
        [{"role": "system", "content": "You summarize conversations."}, user("a")],
    ],
)
def test_what_is_no_compaction(messages: list[Body]) -> None:
    assert not is_compaction({"messages": messages, "tools": [LOOK]}, with_tools=True)
    assert not is_compaction({"messages": messages}, with_tools=False)
