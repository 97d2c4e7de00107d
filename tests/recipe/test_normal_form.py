"""A request means the same, whoever sends it: the normal form, sampled replies put back, a row for each chat."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.gateway.normal_form import normal
from empo2.recipe.gateway.tokens.replies import SampledMessages
from empo2.recipe.trainer.rollout_calls import calls_of, rows_of, turns_of

from .harness import (
    BLOCK,
    CHAT,
    ROOMS,
    TOOL_TEMPLATE,
    Body,
    GatewayUnderTest,
    assistant,
    calling,
    recorded,
    running_gateway,
    trained,
    turns,
    user,
)
from .model_server import ModelServer, tokenizer
from .rollout_events import request

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "replace_all": {"type": "boolean", "default": False}},
        },
    },
}


def normal_chat(messages: list[Body]) -> list[Body]:
    return normal({"messages": messages})["messages"]


def system(text: str) -> Body:
    return {"role": "system", "content": text}


def edited(arguments: str, name: str = "edit", id_: str = "call-0", **more: Any) -> Body:
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    return assistant(None, tool_calls=[call], **more)


@pytest.mark.parametrize(
    ("sent", "form"),
    [
        ([{"role": "developer", "content": "Be brief."}, user("a")], [system("Be brief."), user("a")]),
        ([system("S"), {"role": "developer", "content": "D"}, user("a")], [system("S\n\nD"), user("a")]),
        ([system("x-billing-header: v=1; cch=00af\n\nYou code."), user("a")], [system("You code."), user("a")]),
        ([system("x-billing-header: cch=1"), system("You code."), user("a")], [system("You code."), user("a")]),
        ([system("x-ray: an image\nmeans this."), user("a")], [system("means this."), user("a")]),
        ([user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])], [user("a")]),
        (
            [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}])],
            [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        ),
        (
            [user("a"), system("It is Monday.")],
            [user("a\n\n<system-reminder>\nIt is Monday.\n</system-reminder>")],
        ),
        (
            [user("a"), assistant("b"), {"role": "tool", "tool_call_id": "1", "content": "c"}, system("d")],
            [
                user("a"),
                assistant("b"),
                {"role": "tool", "tool_call_id": "1", "content": "c"},
                user("<system-reminder>\nd\n</system-reminder>"),
            ],
        ),
        ([user("a"), assistant("b", reasoning_content="t")], [user("a"), assistant("b", reasoning="t")]),
        ([user("a"), assistant("b", refusal=None, annotations=[], audio=None)], [user("a"), assistant("b")]),
        ([user("a"), edited('{"path": ')], [user("a"), edited("{}")]),
        ([user("a"), edited('["path"]')], [user("a"), edited("{}")]),
        ([user("a"), edited('{"path":"x"}', index=0)], [user("a"), edited('{"path": "x"}')]),
    ],
)
def test_a_chat_has_one_form(sent: list[Body], form: list[Body]) -> None:
    assert normal_chat(sent) == form
    assert normal_chat(form) == form


def test_the_rest_of_a_request_has_one_form() -> None:
    assert normal({"prompt": ["a"]}) == {"prompt": "a"}
    assert normal({"prompt": [1, 2]}) == {"prompt": [1, 2]}
    assert normal({"prompt": ["a", "b"]}) == {"prompt": ["a", "b"]}
    efforts = [
        normal({"reasoning_effort": effort})["reasoning_effort"] for effort in ("minimal", "low", "xhigh", "max")
    ]
    assert efforts == ["low", "low", "high", "high"]
    assert normal({"tools": [{**EDIT, "cache_control": {}}]}) == {"tools": [EDIT]}


@pytest.mark.parametrize(
    ("sampled", "returned", "is_back"),
    [
        ('{"path": "x"}', '{"replace_all": false, "path": "x"}', True),  # a default of the schema, in front
        ('{"path": "x"}', '{"path": "x", "replace_all": true}', False),
        ('{"path": "x", "replace_all": true}', '{"replace_all": true, "path": "x"}', True),
        ('{"path": "x"}', '{"path": "y"}', False),
        ('{"path": ', '{"arguments": "{\\"path\\": "}', True),  # whatever a client makes of what did not parse
        ('{"path": ', "{}", True),
    ],
)
def test_a_reply_that_a_client_changed_is_put_back(sampled: str, returned: str, is_back: bool) -> None:
    messages = SampledMessages()
    messages.add(edited(sampled, reasoning="I edit."))
    chat = normal_chat([user("a"), edited(returned), user("b")])
    restored = messages.restored({"messages": chat, "tools": [EDIT]})["messages"]
    assert restored == (normal_chat([user("a"), edited(sampled, reasoning="I edit."), user("b")]) if is_back else chat)


def test_thoughts_that_a_client_dropped_are_put_back_by_the_text() -> None:
    messages = SampledMessages()
    for thought in ("first", "second"):
        messages.add(assistant("Done.", reasoning=thought))
    messages.add(assistant("More.", reasoning="third"))
    chat = [user("a"), assistant("Done."), user("b"), assistant("More."), user("c"), assistant("Done."), user("d")]
    restored = messages.restored({"messages": chat})["messages"]
    assert [each.get("reasoning") for each in restored if each["role"] == "assistant"] == ["first", "third", "second"]
    other = {"messages": [user("a"), assistant("I never said this."), user("b")]}
    assert messages.restored(other) is other


def test_a_reply_that_is_said_again_has_the_thoughts_of_its_place() -> None:
    messages = SampledMessages()
    thoughts = [{}, {}, {"reasoning": "third"}, {}]
    for thought in thoughts:
        messages.add(assistant("go north", **thought))
    restored = messages.restored({"messages": [user("a"), assistant("go north")] * len(thoughts)})["messages"]
    assert restored[1::2] == [assistant("go north", **thought) for thought in thoughts]


async def test_a_default_that_comes_back_keeps_tips_and_row(gateway: GatewayUnderTest) -> None:
    """Claude Code's Edit: one row, the tip stays where it was, and the model sees what it sampled."""
    await gateway.store_tips([{"messages": [user("a dark room")]}], "Take the lamp first.")
    gateway.model.template = TOOL_TEMPLATE
    said = calling("edit", {"path": "x"})
    gateway.model.reply = lambda body: said if len(body["messages"]) == 1 else "done"
    rollout = await gateway.create("memory", "off-policy")
    back = edited('{"replace_all": false, "path": "x"}')
    ended = {"role": "tool", "tool_call_id": "call-0", "content": "ok"}
    for messages in ([user("a dark room")], [user("a dark room"), back, ended]):
        body = {"messages": messages, "tools": [EDIT], "max_tokens": 64}
        assert (await gateway.call(rollout, body)).status_code == 200
    played = await recorded(gateway, rollout)
    assert played.tips_shown == [1, 1]
    assert played.sent[1][: len(played.sent[0] + played.replies[0])] == played.sent[0] + played.replies[0]
    assert BLOCK not in gateway.model.seen[-1].prompt or played.tip_free[1] != played.sent[1]
    await gateway.finish(rollout)
    rows, *_ = await trained(gateway, rollout)
    assert rows == [played.tip_free[1] + played.replies[1]]


async def test_broken_arguments_are_learned_from(tmp_path: Path) -> None:
    """vLLM refuses a history with arguments that are no JSON: the rollout would be lost, its error never learned."""
    broken = {**edited('{"path": '), "written": '<call>{"name": "edit", {"path'}
    model = ModelServer(template=TOOL_TEMPLATE)
    async with running_gateway(tmp_path, "gateway.cumulative_tokens=true", model=model) as gateway:
        gateway.model.reply = lambda body: dict(broken) if len(body["messages"]) == 1 else "sorry"
        rollout = await gateway.create()
        told = {"role": "tool", "tool_call_id": "call-0", "content": "not JSON"}
        for messages in ([user("edit x")], [user("edit x"), edited('{"path": '), told]):
            assert (await gateway.call(rollout, {"messages": messages, "max_tokens": 64})).status_code == 200
        played = await recorded(gateway, rollout)
        await gateway.finish(rollout)
        rows, *_ = await trained(gateway, rollout)
    assert rows == [played.sent[1] + played.replies[1]]
    assert played.sent[1][: len(played.sent[0] + played.replies[0])] == played.sent[0] + played.replies[0]


@pytest.mark.parametrize("value", ["NaN", "1e999", r'"\ud83d"', "[" * 300 + "]" * 300])
async def test_arguments_that_json_cannot_carry_are_text(gateway: GatewayUnderTest, value: str) -> None:
    """Python reads them, and cannot write them. The trained row keeps what was sampled."""
    gateway.model.template, given = TOOL_TEMPLATE, f'{{"path": {value}}}'
    gateway.model.reply = lambda body: {**edited(given), "written": f"<call>{given}"}
    rollout, tool = await gateway.create("memory"), {"name": "edit", "input_schema": {"type": "object"}}
    first = {"messages": [user("edit x")], "tools": [EDIT], "max_tokens": 900}
    reply = (await gateway.call(rollout, first)).json()["choices"][0]["message"]
    told = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "no"}
    assert (await gateway.call(rollout, {**first, "messages": [user("edit x"), reply, told]})).status_code == 200
    sent = gateway.last().body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert (reply["tool_calls"][0]["function"]["arguments"], sent) == (given, "{}")
    asked = {"messages": [user("edit x")], "tools": [tool], "max_tokens": 900, "model": "any"}
    answer = await gateway.client.post(f"{gateway.address(rollout)}/messages", json=asked)
    assert answer.status_code == 200 and answer.json()["content"][-1]["input"] == {"arguments": given}


@pytest.mark.parametrize("update", ["on-policy", "off-policy"])
async def test_equal_replies_are_put_back_each_with_its_own_thoughts(gateway: GatewayUnderTest, update: str) -> None:
    await gateway.store_tips(ROOMS[:1], "Take the lamp first.")
    gateway.model.template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    thoughts = iter("ABC")

    def reply(body: Body) -> Any:
        thought = next(thoughts)
        return {"content": "look", "reasoning": thought, "written": f"<think>{thought}</think>look"}

    gateway.model.reply, chat = reply, []
    rollout = await gateway.create("memory", update)
    for observation in ("a dark room with a lamp", "it is lit", "a door opens"):
        chat.append(user(observation))
        await gateway.call(rollout, {"messages": chat, "max_tokens": 64})
        chat.append(assistant("look"))  # without the thoughts
    assert BLOCK in gateway.last().prompt
    assert [each.get("reasoning") for each in gateway.last().body["messages"]] == [None, "A", None, "B", None]


async def test_no_call_fails_by_its_tips(gateway: GatewayUnderTest) -> None:
    """A reply's limit that just fits is refused with tips; so is a prompt that just fits."""
    await gateway.store_tips(ROOMS[:1], "Take the lamp first.")
    rollout = await gateway.create("no-memory")
    await gateway.call(rollout, {**ROOMS[0], "max_tokens": 8})
    length = len(gateway.last().prompt_ids)
    gateway.model.context = length + 100
    with_tips = await gateway.create("memory")
    assert (await gateway.call(with_tips, {**ROOMS[0], "max_tokens": 100})).status_code == 200
    assert BLOCK in gateway.last().prompt and "max_tokens" not in gateway.last().body
    gateway.model.context = length + 4
    squeezed = await gateway.create("memory", "off-policy")
    assert (await gateway.call(squeezed, {**ROOMS[0], "max_tokens": 4})).status_code == 200
    assert BLOCK not in gateway.last().prompt
    assert gateway.last().body["max_tokens"] == 4
    (call,) = await gateway.calls(squeezed)
    assert call["tip_ids"] == [] and call["tip_free_prompt_token_ids"] == call["prompt_token_ids"]
    assert (await gateway.call(squeezed, {**ROOMS[1], "max_tokens": 4})).status_code == 400, "too long stays too long"
    without, before = await gateway.create("memory", scope="another"), len(gateway.model.requests())
    assert (await gateway.call(without, {**ROOMS[1], "max_tokens": 4})).status_code == 400
    assert len(gateway.model.requests()) == before + 2, "without its limit, but not again without tips that it has not"
    metrics = await gateway.ended(squeezed)
    assert (metrics["empo2/tips_withdrawn"], metrics["empo2/reply_limits_lifted"]) == (1, 4)
    # What the policy has not read gets no credit: of four searches one was sent with a tip.
    assert metrics["empo2/tips_injected_per_call"] == metrics["empo2/hit_rate"] == 0.25
    assert await gateway.query("SELECT searches, hits FROM plays") == [(2, 0)]
    assert await gateway.query("SELECT * FROM credits") == []


async def test_no_call_fails_by_its_tips_while_another_one_loses_its_own(gateway: GatewayUnderTest) -> None:
    """Both calls of an episode are under way with tips when the first of them is refused as too long."""
    await gateway.store_tips(ROOMS[:1], "Take the lamp first.")
    chats = [turns("a dark room with a lamp", system=f"You play game {game}.")[0] for game in "AB"]
    plain = await gateway.create("no-memory")
    await gateway.call(plain, {**chats[0], "max_tokens": 4})
    gateway.model.context = len(gateway.last().prompt_ids) + 4
    gateway.model.delay = lambda path, body: 1 if path == CHAT and BLOCK in str(body) else 0
    rollout = await gateway.create("memory", "off-policy")
    answers = await asyncio.gather(*(gateway.call(rollout, {**chat, "max_tokens": 4}) for chat in chats))
    assert [answer.status_code for answer in answers] == [200, 200]
    for call in await gateway.calls(rollout):
        assert call["tip_ids"] == [] and call["tip_free_prompt_token_ids"] == call["prompt_token_ids"]


async def test_a_call_that_was_sent_with_tips_is_recorded_with_them(gateway: GatewayUnderTest) -> None:
    """Also where another call of its episode has lost its tips meanwhile."""
    await gateway.store_tips(ROOMS[:1], "Take the lamp first.")
    short, long = (turns("a dark room with a lamp", system="You play a game." * times)[0] for times in (1, 20))
    plain = await gateway.create("no-memory")
    await gateway.call(plain, {**long, "max_tokens": 4})
    gateway.model.context = len(gateway.last().prompt_ids) + 4
    gateway.model.delay = lambda path, body: 5 if path == CHAT and "game.You" not in str(body) else 0
    rollout = await gateway.create("memory", "off-policy")
    answers = await asyncio.gather(*(gateway.call(rollout, {**chat, "max_tokens": 4}) for chat in (short, long)))
    assert [answer.status_code for answer in answers] == [200, 200]
    with_tips = {BLOCK in tokenizer().decode(call["prompt_token_ids"]): call for call in await gateway.calls(rollout)}
    assert with_tips[True]["tip_ids"] == [1] and with_tips[False]["tip_ids"] == []
    assert BLOCK not in tokenizer().decode(with_tips[True]["tip_free_prompt_token_ids"])


async def test_a_prompt_goes_on_from_the_reply_to_one_whose_tips_were_withdrawn(gateway: GatewayUnderTest) -> None:
    """Tips then stand before what is new in it, not before the whole of it: the two prompts begin alike."""
    await gateway.store_tips([{"prompt": "a dark room"}], "Take the lamp first.")
    rollout, prompt = await gateway.create("memory"), "a dark room\n> "
    gateway.model.context = len(tokenizer()(prompt)["input_ids"]) + 4
    answer = await gateway.call(rollout, {"prompt": prompt, "max_tokens": 4})
    assert answer.status_code == 200 and gateway.model.requests("/v1/completions")[-1].body["prompt"] == prompt
    gateway.model.context = 1000
    said = prompt + answer.json()["choices"][0]["text"]
    assert (await gateway.call(rollout, {"prompt": f"{said}\na dark room\n> "})).status_code == 200
    sent = gateway.model.requests("/v1/completions")[-1].body["prompt"]
    assert sent.startswith(said) and BLOCK in sent
    assert (await gateway.drain())["empo2/tips_withdrawn"] == 1


async def test_a_limit_of_plain_grpo_is_lifted_and_counted(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, "algorithm.name=grpo", model=ModelServer(context=100)) as gateway:
        rollout = await gateway.create(None)
        assert (await gateway.call(rollout, {**ROOMS[0], "max_tokens": 10**6})).status_code == 200
        assert (await gateway.drain())["empo2/reply_limits_lifted"] == 1


async def test_azures_addresses_and_keys_are_taken(gateway: GatewayUnderTest) -> None:
    rollout = await gateway.create()
    body, key = {**ROOMS[0], "max_tokens": 8}, gateway.variables(rollout)["AGL_KEY"]
    path = f"{gateway.address(rollout)}/deployments/policy/chat/completions?api-version=2025-01-01"
    async with gateway.as_agent() as agent:
        agent.headers.pop("authorization")
        assert (await agent.post(path, json=body)).status_code == 401
        for headers in ({"api-key": key}, {"authorization": f"bearer {key}"}):
            assert (await agent.post(path, json=body, headers=headers)).status_code == 200
    assert len(await gateway.calls(rollout)) == 2


def test_chats_that_take_turns_have_a_row_each() -> None:
    """A1 B1 A2 B2, as a main agent and a sub-agent that runs beside it: two rows, not four."""
    prompts = {"A1": [1], "B1": [2], "A2": [1, 10, 3], "B2": [2, 20, 4], "C": [5]}
    replies = {"A1": [10], "B1": [20], "A2": [11], "B2": [21], "C": [30]}
    events = [request(prompts[name], replies[name], text=name) for name in ("A1", "B1", "A2", "B2", "C")]
    rows = rows_of(turns_of(calls_of(events)))
    assert [[turn.prompt for turn in row] for row in rows] == [[[1], [1, 10, 3]], [[2], [2, 20, 4]], [[5]]]


def test_a_branch_goes_on_with_the_longest_chat() -> None:
    events = [
        request([1], [10]),
        request([1, 10, 2], [11]),
        request([1, 10, 2, 11, 3], [12]),
        request([1, 10, 4], [13]),
    ]
    rows = rows_of(turns_of(calls_of(events)))
    assert [len(row) for row in rows] == [3, 1]


def test_a_chat_in_its_form_is_not_changed() -> None:
    for body in ROOMS:
        assert json.dumps(normal(body)) == json.dumps(body)
