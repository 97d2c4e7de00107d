"""What agents speak beside plain chat completions, with the real clients: the model sees the same, token for token."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest

from .harness import AGENT_KEY, BLOCK, ROOMS, GatewayUnderTest, is_reflection, prompt_ids, running_gateway
from .model_server import MODEL, Body, tokenizer
from .test_gateway import TOOL_TEMPLATE

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
        functions = [{"name": "act", "arguments": each} for each in arguments]
        calls = [
            {"id": f"call-{number}-{i}", "type": "function", "function": {**f, "arguments": json.dumps(f["arguments"])}}
            for i, f in enumerate(functions)
        ]
        written = text + "".join(f"<call>{json.dumps(function, ensure_ascii=False)}" for function in functions)
        return {"content": text or None, "tool_calls": calls, "written": written}

    return said


Said = tuple[str, list[tuple[str, str, Any]]]


@dataclass
class Agent:
    """One way to speak. `say` sends a user's text, or the results of the last reply's calls; returns text and calls.

    Every object of a client is read again by its type, strictly: clients take objects that lack fields.
    """

    address: str
    key: str = AGENT_KEY
    streamed: bool = False

    def __post_init__(self) -> None:
        self.chat: list[Any] = []
        self.calls: list[str] = []
        self.limit = 64

    async def say(self, text: str) -> Said:
        raise NotImplementedError


class PlainChat(Agent):
    """By hand, as the other tests do."""

    TOOL = {"type": "function", "function": {"name": "act", "description": "Act.", "parameters": PARAMETERS}}

    async def say(self, text: str) -> Said:
        results = [{"role": "tool", "tool_call_id": call, "content": text} for call in self.calls]
        self.chat += results or [{"role": "user", "content": text}]
        message = await self.ask([{"role": "system", "content": SYSTEM}, *self.chat])
        self.chat.append(message)
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or []
        ]
        self.calls = [call[0] for call in calls]
        return message.get("content") or "", calls

    async def ask(self, messages: list[Body]) -> Body:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30, verify=False) as client:
            body = {"model": "any", "max_tokens": self.limit, "messages": messages, "tools": [self.TOOL]}
            answer = await client.post(f"{self.address}/chat/completions", json=body)
        return answer.raise_for_status().json()["choices"][0]["message"]


class StreamedChat(PlainChat):
    """openai, with its own accumulation of chunks."""

    async def ask(self, messages: list[Any]) -> Body:
        async with openai.AsyncOpenAI(base_url=self.address, api_key=self.key) as client:
            tools: Any = [self.TOOL]
            request: Any = {"model": "any", "max_tokens": self.limit, "messages": messages, "tools": tools}
            async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
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


class Responses(Agent):
    """openai's /responses: the whole conversation each time."""

    stateful = False

    async def say(self, text: str) -> Said:
        results = [{"type": "function_call_output", "call_id": call, "output": text} for call in self.calls]
        new: list[Any] = results or [{"role": "user", "content": text}]
        self.chat += new
        async with openai.AsyncOpenAI(base_url=self.address, api_key=self.key) as client:
            request: Any = {
                "model": "any",
                "instructions": SYSTEM,
                "input": self.chat,
                "max_output_tokens": self.limit,
                "tools": [{"type": "function", "name": "act", "description": "Act.", "parameters": PARAMETERS}],
                "store": False,
            }
            if self.stateful:
                request |= {"input": new, "store": True}
                request |= {"previous_response_id": self.last} if len(self.chat) > len(new) else {}
            response = await self.ask(client, request)
        type(response).model_validate(response.to_dict())
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 0
        self.last = response.id
        self.chat += [item.to_dict() for item in response.output]
        calls = [
            (item.call_id, item.name, json.loads(item.arguments))
            for item in response.output
            if item.type == "function_call"
        ]
        self.calls = [call[0] for call in calls]
        return response.output_text, calls

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


class ContinuedResponses(Responses):
    """openai's /responses: only what is new, and the id of the response before it."""

    stateful = True


class Messages(Agent):
    """anthropic."""

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
        request: Any = {
            "model": "any",
            "system": [{"type": "text", "text": SYSTEM}],
            "messages": self.chat,
            "max_tokens": self.limit,
            "tools": [{"name": "act", "description": "Act.", "input_schema": PARAMETERS}],
        }
        async with anthropic.AsyncAnthropic(base_url=self.address, api_key=self.key) as client:
            message = await self.ask(client, request)
        type(message).model_validate(message.to_dict())
        calls = [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        assert message.usage.input_tokens > message.usage.output_tokens > 0
        self.chat.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        self.calls = [call[0] for call in calls]
        return "".join(block.text for block in message.content if block.type == "text"), calls

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
    "responses, continued": ContinuedResponses,
    "responses, continued, streamed": lambda address: ContinuedResponses(address, streamed=True),
    "messages": lambda address: Messages(address.removesuffix("/v1")),
    "messages, streamed": lambda address: Messages(address.removesuffix("/v1"), streamed=True),
    "messages, at the address of the others": Messages,
}


def address_of(gateway: GatewayUnderTest, rollout: str, mode: str = "train") -> str:
    return f"{str(gateway.client.base_url).rstrip('/')}/proxy/rollout/{rollout}/attempt/0/mode/{mode}/openai/v1"


@dataclass
class Played:
    said: list[Said]
    sent: list[list[int]]
    replies: list[list[int]]
    calls: list[Body]


async def play(gateway: GatewayUnderTest, speaker: Callable[[str], Agent], update: str | None = None) -> Played:
    mode = "memory" if update else "no-memory"
    rollout = await gateway.create(mode, update or "on-policy")
    agent = speaker(address_of(gateway, rollout))
    said = [await agent.say(text) for text in HEARD]
    await gateway.client.post(f"/empo2/rollouts/{rollout}/settle")
    events = await gateway.events(rollout, "model_request")
    await gateway.finish(rollout)
    await gateway.drain()
    return Played(
        said,
        [prompt_ids(event) for event in events],
        [event["response"]["choices"][0]["token_ids"] for event in events],
        await gateway.events(rollout, "empo2_call"),
    )


def without_repeats(prompts: list[list[int]]) -> list[list[int]]:
    """agent-lightning keeps the last of calls with equal prompts."""
    return [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]


@pytest.fixture
async def playing(gateway: GatewayUnderTest) -> AsyncIterator[GatewayUnderTest]:
    gateway.model.template = TOOL_TEMPLATE
    gateway.model.reply = reply(gateway)
    yield gateway


@pytest.mark.parametrize("name", SPEAKERS)
async def test_a_dialect_changes_no_token(playing: GatewayUnderTest, name: str):
    """Prompts, tip-free prompts, replies and tips are those of plain chat completions; what the agent hears is, too."""
    gateway = playing
    for update in (None, "on-policy", "off-policy"):
        plain = await play(gateway, PlainChat, update)
        spoken = await play(gateway, SPEAKERS[name], update)
        assert [(text, [(call[1], call[2]) for call in calls]) for text, calls in spoken.said] == [
            (text, [("act", arguments) for arguments in each]) for text, each in SAID
        ]
        assert without_repeats(spoken.sent) == plain.sent
        assert [tokenizer().decode(ids).count(BLOCK) for ids in plain.sent] == [int(update is not None)] * 4
        assert [call["tip_free_prompt_token_ids"] for call in spoken.calls][-1] == plain.calls[-1][
            "tip_free_prompt_token_ids"
        ]
        assert spoken.calls[-1]["prompt_token_ids"] == plain.sent[-1]
    for before, ids, after in zip(plain.sent, plain.replies, plain.sent[1:], strict=False):
        assert after[: len(before + ids)] == before + ids
