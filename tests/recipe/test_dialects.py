"""What agents speak beside plain chat completions, with the real clients: the model sees the same, token for token."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from empo2.recipe.gateway.dialects.anthropic_messages import AnthropicCall
from empo2.recipe.gateway.dialects.responses import ResponsesCall
from empo2.recipe.gateway.dialects.streams import StreamedCompletion
from empo2.recipe.gateway.normal_form import normal

from .harness import (
    AGENT_KEY,
    TOOL_TEMPLATE,
    GatewayUnderTest,
    Played,
    assistant,
    calling,
    is_reflection,
    recorded,
    running_gateway,
    until,
    user,
)
from .model_server import MODEL, Body

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

SYSTEM = "You play a game."
PARAMETERS = {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}
# The user, a tool's result, the user, a tool's result; what the model answers: a call, words, words and a call, words.
HEARD = ["a dark room with a lamp", "the lamp is lit", "部屋には猫がいる 🐈", "a door opens"]
SAID: list[tuple[str, list[Any]]] = [
    ("", [{"action": "go 0"}, {"action": "höher", "far": 1.5}]),
    ("go 1", []),
    ("Let me look. ", [{"action": "go 2"}]),
    ("go 3", []),
]


def reply(gateway: GatewayUnderTest) -> Callable[[Body], str | Body]:
    def said(body: Body) -> str | Body:
        if is_reflection(body):
            return gateway.tip
        number = sum(message["role"] == "assistant" for message in body["messages"])
        text, arguments = SAID[number]
        made = [calling("act", each, 10 * number + i) for i, each in enumerate(arguments)]
        calls = [call for each in made for call in each["tool_calls"]]
        return {"content": text or None, "tool_calls": calls, "written": text + "".join(e["written"] for e in made)}

    return said


Said = tuple[str, list[tuple[str, Any]]]
ACT = {"name": "act", "description": "Act."}


@dataclass
class Agent:
    """One way to speak. `say` sends a user's text, or the results of the last reply's calls; returns text and calls.

    Every object of a client is read again by its type, strictly: clients take objects that lack fields.
    """

    address: str
    streamed: bool = False
    chat: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # ids of the last reply's

    async def say(self, text: str) -> Said:
        raise NotImplementedError


class PlainChat(Agent):
    TOOL: ClassVar[Body] = {"type": "function", "function": {**ACT, "parameters": PARAMETERS}}

    async def say(self, text: str) -> Said:
        results = [{"role": "tool", "tool_call_id": call, "content": text} for call in self.calls]
        self.chat += results or [{"role": "user", "content": text}]
        message = await self.ask([{"role": "system", "content": SYSTEM}, *self.chat])
        self.chat.append(message)
        calls = message.get("tool_calls") or []
        self.calls = [call["id"] for call in calls]
        functions = [call["function"] for call in calls]
        return message.get("content") or "", [(each["name"], json.loads(each["arguments"])) for each in functions]

    async def ask(self, messages: list[Body]) -> Body:
        headers = {"Authorization": f"Bearer {AGENT_KEY}"}
        async with httpx.AsyncClient(headers=headers, timeout=30, verify=False) as client:
            body = {"model": "any", "max_tokens": 64, "messages": messages, "tools": [self.TOOL]}
            answer = await client.post(f"{self.address}/chat/completions", json=body)
        return answer.raise_for_status().json()["choices"][0]["message"]


class StreamedChat(PlainChat):
    async def ask(self, messages: list[Any]) -> Body:
        request: Any = {"model": "any", "max_tokens": 64, "messages": messages, "tools": [self.TOOL]}
        request["stream_options"] = {"include_usage": True}
        client = openai.AsyncOpenAI(base_url=self.address, api_key=AGENT_KEY)
        async with client, client.chat.completions.stream(**request) as stream:
            async for each in stream:
                if each.type == "chunk":
                    type(each.chunk).model_validate(each.chunk.to_dict())
            completion = await stream.get_final_completion()
        (choice,) = completion.choices
        assert choice.finish_reason == "stop"
        assert completion.usage is not None
        assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens > 0
        message = choice.message.to_dict()
        fields: Body = {name: message[name] for name in ("role", "content") if name in message}
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
            for call in choice.message.tool_calls or []
            if (arguments := call.function.arguments)
        ]
        return {**fields, "tool_calls": calls} if calls else fields


@dataclass
class Responses(Agent):
    """openai's /responses: the whole conversation each time, or only what is new and the id of the response before."""

    continued: bool = False

    async def say(self, text: str) -> Said:
        results = [{"type": "function_call_output", "call_id": call, "output": text} for call in self.calls]
        new: list[Any] = results or [{"role": "user", "content": text}]
        self.chat += new
        tools = [{"type": "function", **ACT, "parameters": PARAMETERS}]
        request: Any = {"model": "any", "instructions": SYSTEM, "max_output_tokens": 64, "tools": tools}
        request |= {"input": new, "store": True} if self.continued else {"input": self.chat, "store": False}
        if self.continued and len(self.chat) > len(new):
            request["previous_response_id"] = self.last
        async with openai.AsyncOpenAI(base_url=self.address, api_key=AGENT_KEY) as client:
            response = await self.ask(client, request)
        type(response).model_validate(response.to_dict())
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 0
        self.last = response.id
        self.chat += [item.to_dict() for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        self.calls = [call.call_id for call in calls]
        return response.output_text, [(call.name, json.loads(call.arguments)) for call in calls]

    async def ask(self, client: openai.AsyncOpenAI, request: Any) -> Any:
        if not self.streamed:
            return await client.responses.create(**request)
        events = []
        async for each in await client.responses.create(**request, stream=True):
            type(each).model_validate(each.to_dict())
            events.append(each)
        assert [each.sequence_number for each in events] == list(range(len(events)))
        assert [each.type for each in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        async with client.responses.stream(**request) as stream:  # once more, gathered by the client
            async for _ in stream:
                pass
            return await stream.get_final_response()


class Messages(Agent):
    async def say(self, text: str) -> Said:
        results = [{"type": "tool_result", "tool_use_id": call, "content": text} for call in self.calls]
        # As its users cache prompts: the mark stands at the newest block, and is taken from the one before it.
        for message in self.chat:
            if isinstance(message["content"], list):
                for block in message["content"]:
                    block.pop("cache_control", None)
        content: Any = results or [{"type": "text", "text": text}]
        content[-1]["cache_control"] = {"type": "ephemeral"}
        self.chat.append({"role": "user", "content": content})
        request: Any = {"model": "any", "system": [{"type": "text", "text": SYSTEM}], "messages": self.chat}
        request |= {"max_tokens": 64, "tools": [{**ACT, "input_schema": PARAMETERS}]}
        async with anthropic.AsyncAnthropic(base_url=self.address, api_key=AGENT_KEY) as client:
            message = await self.ask(client, request)
        type(message).model_validate(message.to_dict())
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        assert message.usage.input_tokens > message.usage.output_tokens > 0
        self.chat.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        self.calls = [call.id for call in calls]
        text = "".join(block.text for block in message.content if block.type == "text")
        return text, [(call.name, call.input) for call in calls]

    async def ask(self, client: anthropic.AsyncAnthropic, request: Any) -> Any:
        if not self.streamed:
            return await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            async for each in stream:
                if each.type in ("message_start", "message_delta", "message_stop", "content_block_start"):
                    type(each).model_validate(each.to_dict())
            return await stream.get_final_message()


SPEAKERS: dict[str, Callable[[str], Agent]] = {
    "chat, streamed": StreamedChat,
    "responses": Responses,
    "responses, streamed": lambda address: Responses(address, streamed=True),
    "responses, continued": lambda address: Responses(address, continued=True),
    "messages": lambda address: Messages(address.removesuffix("/v1")),
    "messages, streamed": lambda address: Messages(address.removesuffix("/v1"), streamed=True),
    "messages, at the address of the others": Messages,
}


async def play(
    gateway: GatewayUnderTest, speaker: Callable[[str], Agent], update: str | None = None
) -> tuple[list[Said], Played]:
    rollout = await gateway.create("memory" if update else "no-memory", update or "on-policy")
    agent = speaker(gateway.address(rollout))
    said = [await agent.say(text) for text in HEARD]
    played = await recorded(gateway, rollout)
    await gateway.ended(rollout)
    return said, played


@pytest.mark.parametrize("update", [None, "on-policy", "off-policy"])
async def test_a_dialect_changes_no_token(gateway: GatewayUnderTest, update: str | None):
    """Prompts, tip-free prompts, replies and tips are those of plain chat completions; what the agent hears is, too."""
    gateway.model.template, gateway.model.reply = TOOL_TEMPLATE, reply(gateway)
    if update:
        await play(gateway, PlainChat)  # leaves the tip that the others are shown
    _, plain = await play(gateway, PlainChat, update)
    assert plain.tips_shown == [int(update is not None)] * 4
    for before, ids, after in zip(plain.sent, plain.replies, plain.sent[1:], strict=False):
        assert after[: len(before + ids)] == before + ids
    for name, speaker in SPEAKERS.items():
        said, spoken = await play(gateway, speaker, update)
        assert said == [(text, [("act", arguments) for arguments in each]) for text, each in SAID], name
        # agent-lightning keeps the last of calls with equal prompts.
        assert [list(ids) for ids in dict.fromkeys(map(tuple, spoken.sent))] == plain.sent, name
        for ids in ("tip_free_prompt_token_ids", "prompt_token_ids"):
            assert spoken.calls[-1][ids] == plain.calls[-1][ids], name


async def post(gateway: GatewayUnderTest, rollout: str, path: str, body: Body) -> httpx.Response:
    async with gateway.as_agent() as client:
        return await client.post(f"{gateway.address(rollout)}/{path}", json=body)


def events_of(stream: str) -> list[Body]:
    blocks = stream.split("\n\n")
    assert blocks.pop() == ""
    data = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [json.loads(each[6:]) if each != "data: [DONE]" else {"done": True} for each in data]


def test_a_stream_has_the_chunks_of_its_reply():
    spoken = {"role": "assistant", "content": "a", "reasoning": "hm"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    completion = {
        "id": "c", "created": 1, "model": "m", "object": "chat.completion", "usage": {"total_tokens": 5},
        "choices": [
            {"index": 0, "message": spoken, "finish_reason": "length", "logprobs": {"content": []}},
            {"index": 1, "message": called, "finish_reason": "tool_calls", "logprobs": None},
        ],
    }  # fmt: skip

    def chunks(**asked: Any) -> list[Body]:
        call = StreamedCompletion("chat/completions", {"n": 2, "stream": True, **asked})
        assert call.body == {"n": 2}
        return events_of(bytes(call.answer(completion).body).decode())

    *plain, done = chunks()
    assert done == {"done": True}
    head = {"id": "c", "object": "chat.completion.chunk", "model": "m", "created": 1}
    assert all(chunk.items() >= head.items() and "usage" not in chunk for chunk in plain)
    parts = [(c["index"], c["delta"], c["finish_reason"]) for chunk in plain for c in chunk["choices"]]
    first = {"role": "assistant", "content": ""}
    assert parts == [
        (0, first, None), (0, {"reasoning": "hm"}, None), (0, {"content": "a"}, None), (0, {}, "length"),
        (1, first, None), (1, {"tool_calls": [{"index": 0, "id": "x"}]}, None), (1, {}, "tool_calls"),
    ]  # fmt: skip
    with_usage = chunks(stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in with_usage[-3:-1]] == [None, {"total_tokens": 5}]


async def test_a_completion_is_streamed(gateway: GatewayUnderTest):
    gateway.model.reply = lambda body: " a b"
    asked: Any = {"model": "any", "prompt": "x", "max_tokens": 8, "stream_options": {"include_usage": True}}
    address = gateway.address(await gateway.create("memory", "off-policy"))
    async with openai.AsyncOpenAI(base_url=address, api_key=AGENT_KEY) as client:
        first, usage = [each async for each in await client.completions.create(**asked, stream=True)]
    assert (first.object, first.choices[0].text, first.choices[0].finish_reason) == ("text_completion", " a b", "stop")
    used = usage.usage
    assert used and used.total_tokens == used.prompt_tokens + used.completion_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_why_a_reply_ended(gateway: GatewayUnderTest, streamed: bool):
    rollout = await gateway.create("memory")
    gateway.model.reply = lambda body: "one two three four five six"
    chat = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "stream": streamed}
    answer = await post(gateway, rollout, "messages", {**chat, "max_tokens": 2})
    message = events_of(answer.text)[-2]["delta"] if streamed else answer.json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    answer = await post(gateway, rollout, "responses", {"input": "hi", "max_output_tokens": 2, "stream": streamed})
    event = events_of(answer.text)[-1] if streamed else {"type": "response.incomplete", "response": answer.json()}
    assert event["type"] == "response.incomplete"
    response = event["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert gateway.last().body["max_completion_tokens"] == 2
    choice = {"index": 0, "message": {"content": "go"}, "finish_reason": "stop", "stop_reason": "\n"}
    gateway.model.answer = lambda body: {"model": "m", "choices": [choice]}
    answer = await post(gateway, rollout, "messages", {**chat, "max_tokens": 9, "stop_sequences": ["\n"]})
    message = events_of(answer.text)[-2]["delta"] if streamed else answer.json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "\n")
    assert gateway.last().body["stop"] == ["\n"]


def text(said: str) -> Body:
    return {"type": "text", "text": said}


THOUGHT = {"model": "m", "choices": [{"message": {"content": "go", "reasoning": "hm"}}]}


def test_what_a_message_may_hold():
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = [text("a"), text("b"), {"type": "image", "source": source}]
    asked = {
        "max_tokens": 9,
        "system": [text("S"), text("T")],
        "messages": [
            user([text("x"), text("y")]),
            assistant([{"type": "thinking", "thinking": "t", "signature": ""}, call]),
            user([{"type": "tool_result", "tool_use_id": "1", "content": result}, text("on")]),
            assistant("I"),
        ],
        "tools": [{"name": "look", "input_schema": {}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u"},
        "chat_template_kwargs": {"style": "terse"},
    }
    call = AnthropicCall(asked, {})
    message, seen = json.loads(bytes(call.answer(THOUGHT).body)), normal(call.body)
    assert message["content"] == [{"type": "thinking", "thinking": "hm", "signature": ""}, text("go")]
    tool_call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert seen["messages"] == [
        {"role": "system", "content": "ST"},
        user([text("x"), text("y")]),
        assistant(None, reasoning="t", tool_calls=[tool_call]),
        {"role": "tool", "tool_call_id": "1", "content": "a\nb"},
        user([image, text("on")]),
        assistant("I"),
    ]
    assert (seen["tool_choice"], seen["parallel_tool_calls"], seen["max_tokens"]) == ("required", False, 9)
    assert (seen["continue_final_message"], seen["add_generation_prompt"]) == (True, False)
    assert seen["chat_template_kwargs"] == {"style": "terse"}
    assert {"system", "metadata"}.isdisjoint(seen)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}, "a"),
        ({"type": "document", "title": "T", "context": "C", "source": {"type": "content", "content": "a"}}, "T\nC\na"),
        ({"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}, "a\nb"),
        ({"type": "search_result", "title": "T", "source": "https://x", "content": [text("a")]}, "T\nhttps://x\na"),
        ({"type": "tool_reference", "tool_name": "look"}, "look"),
    ],
)
def test_blocks_with_a_text_in_them_become_text(block: Body, told: str):
    assert normal(AnthropicCall({"messages": [user([block])]}, {}).body)["messages"] == [user(told)]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    (seen,) = AnthropicCall({"messages": [user([result])]}, {}).body["messages"]
    assert (seen["role"], seen["content"]) == ("tool", told)


def test_tools_of_anthropics_servers_are_not_offered_and_deferred_ones_are():
    deferred = {"name": "act", "input_schema": PARAMETERS, "defer_loading": True}
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    plain = {"messages": ONE, "tools": [{"name": "act", "input_schema": PARAMETERS}]}
    assert (
        AnthropicCall({"messages": ONE, "tools": [SEARCH, deferred, search]}, {}).body == AnthropicCall(plain, {}).body
    )
    alone = AnthropicCall({"messages": ONE, "tools": [SEARCH], "tool_choice": {"type": "any"}}, {})
    assert normal(alone.body) == {"messages": ONE}


class Move(BaseModel):
    action: str


async def test_anthropics_client_gets_the_object_that_it_asked_for(gateway: GatewayUnderTest):
    gateway.model.reply = lambda body: '{"action": "go 0"}'
    address = gateway.address(await gateway.create("memory")).removesuffix("/v1")
    asked: Any = {"model": "any", "max_tokens": 32, "messages": ONE}
    async with anthropic.AsyncAnthropic(base_url=address, api_key=AGENT_KEY) as client:
        schemas = []
        for messages in (client.messages, client.beta.messages):
            parsed = await messages.parse(**asked, output_format=Move)
            assert parsed.parsed_output == Move(action="go 0")
            schemas.append(gateway.last().body["response_format"])
    given = schemas[0]["json_schema"]["schema"]
    older = AnthropicCall({**asked, "output_format": {"type": "json_schema", "schema": given}}, {})
    assert older.body["response_format"] == schemas[0] == schemas[1]
    assert schemas[0]["type"] == "json_schema" and given["properties"] == {
        "action": {"title": "Action", "type": "string"}
    }


def test_what_the_items_of_a_response_may_be():
    seen_and_heard = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u"}]
    schema = {"type": "object", "properties": {}}
    asked = {
        "instructions": "S",
        "input": [
            {"role": "developer", "content": "D"},
            user(seen_and_heard),
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "b"}]},
            *({"type": "message", **assistant(text)} for text in ("one", "two")),
            user("on"),
        ],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "look", "parameters": schema, "strict": None}],
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
    }
    call = ResponsesCall(asked, {})
    response, seen = json.loads(bytes(call.answer(THOUGHT).body)), normal(call.body)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    for name in ("instructions", "text", "reasoning", "tools", "tool_choice", "parallel_tool_calls"):
        assert response[name] == asked[name]
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "look", "arguments": arguments}}
        for number, arguments in ((1, '{"at": 1}'), (2, "{}"))
    ]
    assert seen["messages"] == [
        {"role": "system", "content": "S\n\nD"},
        {"role": "user", "content": [text("x"), {"type": "image_url", "image_url": {"url": "u"}}]},
        assistant("so", reasoning="t", tool_calls=calls),
        *({"role": "tool", "tool_call_id": number, "content": text} for number, text in (("1", "a"), ("2", "b"))),
        *(assistant("one"), assistant("two"), user("on")),
    ]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert (seen["response_format"], seen["reasoning_effort"]) == (form, "low")
    assert seen["tools"] == [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    assert seen["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert {"prompt_cache_key", "text", "input", "reasoning"}.isdisjoint(seen)


async def test_a_response_is_continued_within_its_rollout_only(gateway: GatewayUnderTest):
    first, second = await gateway.create("memory"), await gateway.create("memory")
    gateway.model.reply = lambda body: f"go {len(body['messages'])}"
    stored = (await post(gateway, first, "responses", {"input": "a", "instructions": "S"})).json()
    unstored = (await post(gateway, first, "responses", {"input": "a", "store": False})).json()
    on = (await post(gateway, first, "responses", {"input": "b", "previous_response_id": stored["id"]})).json()
    # Instructions hold for one response.
    assert [message["content"] for message in gateway.last().body["messages"]] == ["a", "go 2", "b"]
    (item,) = on["output"]
    again = [user("c"), {"type": "item_reference", "id": item["id"]}]
    await post(gateway, first, "responses", {"input": [*again, user("d")]})
    assert [message["content"] for message in gateway.last().body["messages"]] == ["c", "go 3", "d"]
    for rollout, id_ in ((first, unstored["id"]), (second, stored["id"]), (first, "resp_x")):
        refused = await post(gateway, rollout, "responses", {"input": "b", "previous_response_id": id_})
        assert refused.status_code == 400
        assert f"previous_response_id='{id_}': no response of this rollout" in refused.json()["error"]["message"]
    gone = await post(gateway, second, "responses", {"input": again[1:]})
    assert "item_reference" in gone.json()["error"]["message"]


def test_what_a_client_sends_with_each_call_is_kept_once() -> None:
    """Of 30 turns by two agents in turn: all items of a response can be continued, and no turn is kept twice."""
    stored: dict[str, list[Body]] = {}
    agents: list[list[Body]] = [[user("a")], [user("b")]]
    for number in range(60):
        said = agents[number % 2]
        completion = {"model": "m", "choices": [{"message": {"content": f"go {number}"}, "finish_reason": "stop"}]}
        call = ResponsesCall({"input": json.loads(json.dumps(said))}, stored)
        output = json.loads(bytes(call.answer(completion).body))["output"]
        said += [{name: value for name, value in output[0].items() if name != "status"}, user(f"turn {number}")]
    assert [len(items) for items in stored.values()][-2:] == [60, 60]
    assert len({id(item) for items in stored.values() for item in items}) < 60 * 3


async def test_a_thread_of_anthropics_is_continued_with_its_chat_system_and_tools(gateway: GatewayUnderTest):
    first, second = await gateway.create("memory"), await gateway.create("memory")
    gateway.model.reply, gateway.model.template = lambda body: f"go {len(body['messages'])}", TOOL_TEMPLATE
    tools = [{"name": "act", "input_schema": PARAMETERS}]
    begin = {"max_tokens": 9, "system": "S", "tools": tools, "messages": [user("a")]}
    previous = (await post(gateway, first, "messages", {**begin, "thread": {"type": "create"}})).json()["id"]
    begun = gateway.last()
    for text in ("b", "c"):
        thread = {"type": "continue", "previous_message_id": previous}
        asked = {"max_tokens": 9, "messages": [user(text)], "thread": thread}
        previous = (await post(gateway, first, "messages", asked)).json()["id"]
    last = gateway.last().body
    assert [message["content"] for message in last["messages"]] == ["S", "a", "go 2", "b", "go 4", "c"]
    assert last["tools"] == begun.body["tools"] and "thread" not in last
    assert gateway.last().prompt_ids[: len(begun.prompt_ids)] == begun.prompt_ids  # so that the turns are one row
    alone = (await post(gateway, first, "messages", begin)).json()["id"]  # of no thread
    for rollout, id_ in ((first, alone), (second, previous)):
        thread = {"type": "continue", "previous_message_id": id_}
        refused = await post(gateway, rollout, "messages", {**begin, "thread": thread})
        assert refused.status_code == 400
        assert f"thread.previous_message_id='{id_}': no reply of a thread" in refused.json()["error"]["message"]


async def test_a_chat_that_grows_behind_its_id_has_the_limit_of_all_chats(tmp_path):
    async with running_gateway(tmp_path, "gateway.max_request=0.01") as gateway:
        rollout, previous, answers = await gateway.create("no-memory"), None, []
        for _ in range(3):
            asked = {"input": "x " * 2000, "previous_response_id": previous}
            answers.append(await post(gateway, rollout, "responses", asked))
            previous = answers[-1].json().get("id", previous)
        assert [answer.status_code for answer in answers] == [200, 200, 413]
        assert "gateway.max_request=0.01" in answers[-1].json()["error"]["message"]


ONE: list[Any] = [user("x")]
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
CHOSEN = {"type": "tool", "name": "web_search"}
REFUSED: list[tuple[str, Body, str]] = [
    ("messages", {}, "messages: must be a list of at least one message"),
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: must be user"),
    ("messages", {"messages": [user(3)]}, "messages[0].content: must be a string"),
    ("messages", {"messages": [user([{"type": "video"}])]}, "messages[0]: a block of type 'video' cannot be"),
    ("messages", {"messages": [user([PDF])]}, "messages[0]: a document of type 'base64' needs Anthropic's own servers"),
    ("messages", {"messages": ONE, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: 'bash_20250124'"),
    ("messages", {"messages": ONE, "tools": [SEARCH], "tool_choice": CHOSEN}, "tool_choice.name='web_search': needs"),
    ("messages", {"messages": ONE, "tools": 3}, "not one of /messages"),
    ("responses", {}, "input: must be a string or a list of items"),
    ("responses", {"input": []}, "messages: must be a list of at least one message"),
    ("responses", {"input": [{"type": "computer_call"}]}, "input[0]: an item of type 'computer_call'"),
    ("responses", {"input": [user([{"type": "input_file"}])]}, "input[0]: a part of type 'input_file'"),
    ("responses", {"input": "x", "tools": ["web_search"]}, "tools[0].type=None"),
    ("responses", {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name=None"),
    ("responses", {"input": "x", "background": True}, "background: needs OpenAI's own servers"),
    ("responses", {"input": "x", "text": "y"}, "not one of /responses"),
    ("completions", {"prompt": "x", "messages": [1]}, "messages: a completion has a prompt"),
]


async def test_what_cannot_be_translated_is_refused(gateway: GatewayUnderTest):
    rollout = await gateway.create("memory")
    for path, body, problem in REFUSED:
        for streamed in (False, True):
            answer = await post(gateway, rollout, path, {**body, "stream": streamed})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), body
            assert problem in error["message"], body
            assert (answer.json().get("type") == "error") == (path == "messages"), body
    assert gateway.model.requests() == []


ASKED: dict[str, Body] = {
    "messages": {"model": "any", "max_tokens": 4, "messages": ONE},
    "responses": {"input": "hi"},
    "chat/completions": {"messages": ONE, "stream": True},
}


@pytest.mark.parametrize("path", ASKED)
async def test_errors_are_those_of_the_dialect(gateway: GatewayUnderTest, path: str):
    rollout = await gateway.create("memory", "off-policy")
    gateway.model.context = 3
    answer = await post(gateway, rollout, path, ASKED[path])
    assert answer.status_code == 400
    assert "maximum context length is 3 tokens" in answer.json()["error"]["message"]  # agents look for it
    gateway.model.context, gateway.model.answer = 8192, lambda body: {"choices": None}
    answer = await post(gateway, rollout, path, ASKED[path])
    assert answer.status_code == 502 and "the model server's answer is no completion" in answer.text
    gateway.model.answer = None
    await gateway.client.post("/proxy/pause", json={"retry_after_seconds": 3})
    answer = await post(gateway, rollout, path, ASKED[path])
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    await gateway.client.post("/proxy/resume")
    if path == "messages":
        assert answer.json() == {"type": "error", "error": {"type": "rate_limit_error", "message": "gateway paused"}}
    assert (await post(gateway, rollout, path, ASKED[path])).status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "models"])
async def test_refusals_are_told_as_the_api_tells_them(gateway: GatewayUnderTest, path: str):
    rollout = await gateway.create("memory")
    other, url = ("POST", "GET") if path == "models" else ("GET", "POST"), f"{gateway.address(rollout)}/{path}"
    right = {"authorization": f"Bearer {AGENT_KEY}"}
    of_anthropic = [{}, {"anthropic-version": "2023-06-01"}] if path == "models" else [{}]
    for more in of_anthropic:
        refused = [
            await gateway.client.request(method, asked, headers={**key, **more}, json=ASKED.get(path))
            for method, asked, key in (
                (other[1], url, {"authorization": "Bearer wrong"}),
                (other[0], url, right),
                ("DELETE", url, right),
                ("POST", f"{gateway.address('nowhere')}/{path}", right),
                ("POST", f"{url}/nothing", right),
            )
        ]
        statuses = [401, 405, 405, *([405, 405] if path == "models" else [404, 404])]
        assert [answer.status_code for answer in refused] == statuses
        assert refused[1].headers["allow"] == ("GET" if path == "models" else "POST")
        kinds = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}
        for answer in refused:
            error = answer.json()["error"]
            assert error["message"] and "admin key" not in answer.text and "detail" not in answer.json()
            if path == "messages" or more:
                assert (answer.json()["type"], error["type"]) == ("error", kinds[answer.status_code])
            else:
                assert error == {**error, "type": "invalid_request_error", "param": None, "code": None}


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_an_error_of_the_model_server_that_is_a_text_reaches_the_agent_as_this_text(
    gateway: GatewayUnderTest, path: str
):
    """At once: agent-lightning would ask five times more."""
    gateway.model.fault = lambda path, body: "text"
    rollout = await gateway.create("memory", "off-policy")
    answer = await post(gateway, rollout, path, {**ASKED[path], "stream": False})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the engine has ended")
    assert len(gateway.model.requests()) == 1
    (event,) = await gateway.events(rollout, "model_request")  # which names the fault where the rollout is shown
    assert event["http_status"] == 500 and event["response"]["error"]["message"] == "the engine has ended"


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_a_stream_is_kept_alive_while_the_model_generates(
    gateway: GatewayUnderTest, path: str, failing: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("empo2.recipe.gateway.stages.dialect._KEEP_ALIVE_SECONDS", 0.02)
    gateway.model.reply, gateway.model.delay = lambda body: "wait", lambda path, body: path != "/tokenize"
    gateway.model.context = 3 if failing else 8192
    rollout = await gateway.create("memory", "off-policy")
    answer = await post(gateway, rollout, path, {**ASKED[path], "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    signs = {
        "messages": "event: ping\n",
        "responses": "event: response.in_progress\n",
        "chat/completions": ": the model",
    }
    assert answer.text.count(signs[path]) >= 3
    events = events_of(answer.text)
    if path == "responses":
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created" and len({each["response"]["id"] for each in events[:3]}) == 1
    told = [events[-1]["response"] if path == "responses" else each for each in events if "error" in str(each)]
    if failing:
        assert "maximum context length is 3 tokens" in told[-1]["error"]["message"]
    ends = {"messages": "error" if failing else "message_stop", "chat/completions": None}
    ends["responses"] = "response.failed" if failing else "response.completed"
    assert events[-1].get("type") == ends[path]
    address = gateway.address(rollout)
    async with (
        openai.AsyncOpenAI(base_url=address, api_key=AGENT_KEY, max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=address, api_key=AGENT_KEY, max_retries=0) as other,
    ):
        texts: Any = {
            "chat/completions": lambda: client.chat.completions.stream(model="any", messages=ONE),
            "responses": lambda: client.responses.stream(model="any", input="hi"),
            "messages": lambda: other.messages.stream(model="any", max_tokens=64, messages=ONE),
        }
        expected: Any = (openai.APIError, anthropic.APIError, RuntimeError) if failing else ()
        with pytest.raises(expected) if failing else nullcontext():
            async with texts[path]() as stream:
                async for _ in stream:
                    pass
                final = await getattr(stream, FINAL[path])()
            assert "wait" in str(final)


FINAL = {
    "chat/completions": "get_final_completion",
    "responses": "get_final_response",
    "messages": "get_final_message",
}


async def test_an_agent_that_leaves_a_stream_ends_the_call(gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("empo2.recipe.gateway.stages.dialect._KEEP_ALIVE_SECONDS", 0.1)
    gateway.model.delay = lambda path, body: 60
    rollout = await gateway.create("memory")
    async with gateway.as_agent() as client:
        url = f"{gateway.address(rollout)}/chat/completions"
        async with client.stream("POST", url, json=ASKED["chat/completions"]) as answer:
            assert (await anext(answer.aiter_text())).startswith(": ")
            await until(lambda: bool(gateway.model.requests()))
    await until(lambda: gateway.model.requests()[-1].gone)


async def test_every_name_is_that_of_the_served_model(gateway: GatewayUnderTest):
    rollout = await gateway.create(None)
    address = gateway.address(rollout)
    async with openai.AsyncOpenAI(base_url=address, api_key=AGENT_KEY) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"
    async with anthropic.AsyncAnthropic(base_url=address, api_key=AGENT_KEY) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_tokens_are_counted_as_the_policy_reads_them(gateway: GatewayUnderTest):
    """Without tips, and without a trace."""
    gateway.model.template, gateway.model.reply = TOOL_TEMPLATE, reply(gateway)
    rollout = await gateway.create("memory")
    address = gateway.address(rollout).removesuffix("/v1")
    plain: Any = {"model": "any", "system": SYSTEM, "messages": [user(HEARD[0])]}
    request: Any = {**plain, "tools": [{**ACT, "input_schema": PARAMETERS}]}
    async with anthropic.AsyncAnthropic(base_url=address, api_key=AGENT_KEY, max_retries=0) as client:
        counts = [(await client.messages.count_tokens(**asked)).input_tokens for asked in (plain, request)]
        assert not gateway.model.requests()
        answered = [await client.messages.create(**asked, max_tokens=8) for asked in (plain, request)]
        assert counts == [message.usage.input_tokens for message in answered]
        assert counts[0] < counts[1]
        with pytest.raises(anthropic.BadRequestError, match="messages: must be a list"):
            await client.messages.count_tokens(model="any", messages=[])
        with pytest.raises(anthropic.BadRequestError, match="give it an input_schema"):
            await client.messages.count_tokens(**plain, tools=[{"type": "bash_20250124", "name": "bash"}])
        padded: Any = {"extra_body": {"chat_template_kwargs": {"padding": "max_length", "max_length": 10**8}}}
        with pytest.raises(anthropic.BadRequestError, match=r"chat_template_kwargs\.padding: is no variable"):
            await client.messages.count_tokens(**plain, **padded)
        gateway.model.fault = lambda path, body: 500
        with pytest.raises(anthropic.InternalServerError, match="answers 500 to /tokenize"):
            await client.messages.count_tokens(**request)
    assert len(await gateway.events(rollout, "model_request")) == 2
    gone = gateway.address("gone").removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=gone, api_key=AGENT_KEY, max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="Rollout not found: gone"):
            await client.messages.count_tokens(**request)


async def test_tools_of_responses_that_no_chat_completion_has(gateway: GatewayUnderTest):
    """Codex: a namespace, a custom tool, a local shell; web search is not offered. Calls come back in their form."""
    tools = [
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait", "parameters": {}}]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}},
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": True},
    ]
    called = {"agents__wait": {"seconds": 1}, "patch": {"input": "*** a"}, "local_shell": {"command": ["ls", "-a"]}}
    calls = [
        {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for number, (name, given) in enumerate(called.items())
    ]
    gateway.model.template = TOOL_TEMPLATE
    gateway.model.reply = lambda body: {"content": None, "tool_calls": calls} if len(body["messages"]) == 1 else "ok"
    rollout = await gateway.create("no-memory")
    url = f"{gateway.address(rollout)}/responses"
    first = (await gateway.client.post(url, json={"input": "go", "tools": tools, "store": False})).json()
    offered = gateway.last().body["tools"]
    assert [tool["function"]["name"] for tool in offered] == [*called]
    assert "lark grammar:\nstart: A" in offered[1]["function"]["description"]
    wait, patch, shell = first["output"]
    assert (wait["type"], wait["namespace"], wait["name"]) == ("function_call", "agents", "wait")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** a")
    assert (shell["type"], shell["action"]["command"]) == ("local_shell_call", ["ls", "-a"])
    kinds = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
    results = [{"type": kind, "call_id": f"call-{number}", "output": "done"} for number, kind in enumerate(kinds)]
    items = [{"role": "user", "content": "go"}, *first["output"], *results]
    more = {"input": items, "tools": tools, "store": False, "stream": True}
    assert (await gateway.client.post(url, json=more)).status_code == 200
    said = gateway.last().body["messages"]
    assert [json.loads(call["function"]["arguments"]) for call in said[1]["tool_calls"]] == [*called.values()]
    assert [each["role"] for each in said] == ["user", "assistant", "tool", "tool", "tool"]
