"""Chats that continue from sampled ids: prompts against ids put together by hand, and the cases that stay text."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest

from empo2.recipe.config import VLLM_TRACES, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher import commands, serving
from empo2.recipe.launcher.processes import running
from empo2.recipe.launcher.serving import vllm_command
from empo2.recipe.protocol import KEY_CHECK, PROMPT_IDS
from empo2.recipe.trainer.ray_environment import device
from empo2.recipe.trainer.verl_config import build_verl_config, name_middleware, take_traces

from .harness import BLOCK, GatewayUnderTest, assistant, running_gateway, trained, until, user
from .model_server import MODEL, Body, tokenizer
from .otlp_receiver import OtlpReceiver

END = tokenizer().convert_tokens_to_ids("<|im_end|>")
ON = "gateway.cumulative_tokens=true"
SYSTEM = {"role": "system", "content": "You play."}
ACT: Body = {"type": "function", "function": {"name": "act", "parameters": {"type": "object", "properties": {}}}}


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def letters(text: str) -> list[int]:
    """The text's tokens, a character each: not what the tokenizer makes of it."""
    found = tokenizer().convert_tokens_to_ids([letter.replace(" ", "Ġ") for letter in text])
    assert found != ids(text) and tokenizer().decode(found) == text
    return found


def turn(text: str, role: str = "user") -> str:
    """What the template writes after a reply's last token: the new turn and the begin of the next reply."""
    return f"\n<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"


FIRST = ids(f"<|im_start|>system\nYou play.<|im_end|>{turn('a room')}")


@pytest.fixture
async def gateway(quiet: None, empty_stores: None, tmp_path: Path) -> AsyncIterator[GatewayUnderTest]:
    async with running_gateway(tmp_path, ON) as running:
        yield running


async def play(
    gateway: GatewayUnderTest, replies: list[Any], chats: list[Any], rollout: str | None = None, **more: Any
) -> list[list[int]]:
    answers = iter(replies)
    gateway.model.reply = lambda body: next(answers)
    bodies = [{"messages": chat, "max_tokens": 64, **more} for chat in chats]
    return await gateway.play(rollout or await gateway.create("no-memory"), bodies)


def growing(*texts: str) -> list[list[Body]]:
    messages = [SYSTEM, *(assistant(text) if number % 2 else user(text) for number, text in enumerate(texts))]
    return [messages[: 2 + number] for number in range(0, len(texts), 2)]


CHATS = growing("a room", "go north", "a hall", "look", "a lamp")
DRIFTED = {"content": "go north", "sampled": [*letters("go north"), END]}
REPLIES = [DRIFTED, "look", "take the lamp"]
AS_TEXT = [*FIRST, *ids("go north"), END, *ids(turn("a hall"))]
SECOND = [*FIRST, *letters("go north"), END, *ids(turn("a hall"))]
THIRD = [*SECOND, *ids("look"), END, *ids(turn("a lamp"))]


async def test_where_nothing_drifts_the_chat_is_text_and_else_it_continues_from_the_sampled_ids(
    gateway: GatewayUnderTest,
):
    assert (await play(gateway, ["go north", "look", "wait"], CHATS))[1] == AS_TEXT
    assert not any("prompt_token_ids" in seen.body for seen in gateway.model.requests())
    metrics = await gateway.drain()
    assert (metrics["empo2/token_drift"], metrics["empo2/continued_calls"], metrics["empo2/text_calls"]) == (0, 0, 0)

    gateway.model.seen.clear()
    assert await play(gateway, REPLIES, CHATS) == [FIRST, SECOND, THIRD]
    metrics = await gateway.drain()
    assert (metrics["empo2/continued_calls"], metrics["empo2/text_calls"]) == (2, 0)
    assert metrics["empo2/token_drift"] == 1 / 2, "the third call's new reply is tokenized as it was sampled"
    # Where a reply drifts, the server renders the chat with and without the new turn.
    assert len(gateway.model.requests("/tokenize")) == 2 + 1


async def test_without_the_option_drift_is_counted_and_nothing_else(quiet: None, empty_stores: None, tmp_path: Path):
    async with running_gateway(tmp_path) as gateway:
        sent = await play(gateway, REPLIES, CHATS)
        assert sent[1] == AS_TEXT and not gateway.model.requests("/tokenize")
        metrics = await gateway.drain()
    assert (metrics["empo2/token_drift"], metrics["empo2/continued_calls"], metrics["empo2/text_calls"]) == (0.5, 0, 0)


async def test_a_reply_that_met_its_limit_is_given_the_end_of_its_turn(gateway: GatewayUnderTest):
    reply = {"content": "", "sampled": [*letters("go north"), END]}
    sent = await play(gateway, [reply, "look"], growing("a room", "go nor", "a hall"), max_tokens=6)
    assert sent[1] == [*FIRST, *letters("go nor"), END, *ids(turn("a hall"))]


async def test_a_tool_call_stays_as_it_was_written(gateway: GatewayUnderTest):
    """The template writes a space after each colon; the model did not, and vLLM's parser does not tell."""
    call = {"id": "1", "type": "function", "function": {"name": "act", "arguments": '{"n": 1}'}}
    written = [*ids('<tool_call>\n{"name":"act","arguments":{"n":1}}\n</tool_call>'), END]
    reply = {"content": None, "tool_calls": [call], "sampled": written}
    first = [SYSTEM, user("a room")]
    result = {"role": "tool", "tool_call_id": "1", "content": "a hall"}
    # As a client may send it back: empty content, other spaces.
    copy = {"id": "1", "type": "function", "function": {"name": "act", "arguments": '{"n":1}'}}
    chats = [first, [*first, {"role": "assistant", "content": "", "tool_calls": [copy]}, result]]
    sent = await play(gateway, [reply, "look"], chats, tools=[ACT])
    shown = "<tool_response>\na hall\n</tool_response>"
    assert sent[1] == [*sent[0], *written, *ids(turn(shown))]


async def test_replies_to_the_same_chat_are_told_apart(gateway: GatewayUnderTest):
    north, south = {"content": "north", "sampled": [*letters("north"), END]}, "south"
    begin = [SYSTEM, user("a room")]
    chats = [begin, begin, [*begin, assistant("south"), user("a hall")], [*begin, assistant("north"), user("a hall")]]
    sent = await play(gateway, [north, south, "a", "b"], chats)
    assert sent[-2:] == [
        [*FIRST, *ids("south"), END, *ids(turn("a hall"))],
        [*FIRST, *letters("north"), END, *ids(turn("a hall"))],
    ]


async def test_tip_free_prompts_continue_as_the_prompts_with_tips_do(gateway: GatewayUnderTest):
    await gateway.store_tips([{"messages": CHATS[0]}], "Take the lamp.")
    rollout = await gateway.create("memory", "off-policy")
    sent = await play(gateway, REPLIES, CHATS, rollout)
    events = await gateway.events(rollout, "empo2_call")
    assert [event["tip_free_prompt_token_ids"] for event in events] == [FIRST, SECOND, THIRD]
    assert [event["prompt_token_ids"] for event in events] == sent
    assert sent[0] != FIRST and BLOCK in tokenizer().decode(sent[0])
    for before, after, reply in zip(sent[:-1], sent[1:], [letters("go north"), ids("look")], strict=True):
        assert after[: len(before) + len(reply) + 1] == [*before, *reply, END]


# A template that does not show the last reply of a chat, so that a longer chat does not begin with a shorter one.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '.' if loop.last and m.role == 'assistant' else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# As Qwen3's with enable_thinking=false: empty thoughts stand before the newest reply, and before no other.
UNTHINKING = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and loop.index0 > ns.asked %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize("first", ["go north", DRIFTED])
@pytest.mark.parametrize("role", ["user", "tool"])
async def test_a_model_that_is_not_to_think_has_one_row(gateway: GatewayUnderTest, first: str | Body, role: str):
    gateway.model.template = UNTHINKING
    empty = "<think>\n\n</think>\n\n"
    begin = [*FIRST, *ids(empty)]
    said = letters("go north") if isinstance(first, dict) else ids("go north")
    chats = [[{**each, "role": role} if at > 1 and at % 2 else each for at, each in enumerate(chat)] for chat in CHATS]
    second = [*begin, *said, END, *ids(turn("a hall", role) + empty)]
    third = [*second, *ids("look"), END, *ids(turn("a lamp", role) + empty)]
    rollout = await gateway.create("no-memory")
    assert await play(gateway, [first, "look", "take the lamp"], chats, rollout) == [begin, second, third]
    assert (await gateway.drain())["empo2/text_calls"] == 0
    await gateway.finish(rollout, 1.0)
    (row,), *_ = await trained(gateway, rollout)
    assert row == [*third, *ids("take the lamp"), END]


# As Qwen3's within one turn of the user: thoughts stay.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("returned", [{}, {"reasoning": "so so"}, {"reasoning_content": "hm so"}])
@pytest.mark.parametrize("drift", [False, True])
async def test_thoughts_that_an_agent_drops_or_changes_stay(
    gateway: GatewayUnderTest, drift: bool, returned: Body
) -> None:
    gateway.model.template = THINKING
    thoughts = ids("<think>\nhm so\n</think>\n\n")
    said = [*thoughts, *(letters if drift else ids)("go north"), END]
    begin, after = CHATS[0], user("a hall")
    reply = {"content": "go north", "reasoning": "hm so", "sampled": said}
    rollout = await gateway.create("no-memory")
    chats = [begin, [*begin, assistant("go north", **returned), after]]
    assert await play(gateway, [reply, "look"], chats, rollout) == [FIRST, [*FIRST, *said, *ids(turn("a hall"))]]
    assert (await gateway.drain())["empo2/text_calls"] == 0
    await gateway.finish(rollout)
    assert len((await trained(gateway, rollout))[0]) == 1


PICTURE = user([{"type": "text", "text": "see"}, {"type": "image_url", "text": "IMAGE"}])


@pytest.mark.parametrize(
    ("reason", "reply", "second", "change"),
    [
        ("history", DRIFTED, growing("a room", "go  north", "a hall")[1], {}),
        ("history", DRIFTED, growing("another room", "go north", "a hall")[1], {}),
        ("tools", DRIFTED, CHATS[1], {"tools": [ACT]}),
        ("stop", {**DRIFTED, "stop_reason": "\n"}, CHATS[1], {}),
        ("reasoning", {**DRIFTED, "reasoning": "hm"}, CHATS[1], {}),
        ("template", {"content": "go north", "sampled": [*letters("go north"), 0]}, CHATS[1], {}),
        ("template", DRIFTED, CHATS[1], {"chat_template": FORGETFUL}),
        ("images", DRIFTED, [*CHATS[0], assistant("go north"), PICTURE], {}),
    ],
)
async def test_what_is_no_continuation_is_sent_as_text(
    gateway: GatewayUnderTest, reason: str, reply: Body, second: list[Body], change: Body
):
    answers = iter([reply, "look"])
    gateway.model.reply = lambda body: next(answers)
    change = {**change}
    gateway.model.template = change.pop("chat_template", gateway.model.template)
    first = {"messages": CHATS[0], "max_tokens": 64} | ({} if "tools" in change else change)
    sent = await gateway.play(await gateway.create("no-memory"), [first, {**first, "messages": second, **change}])
    rendered = gateway.model.prompt_ids({"messages": second, **change}, "/tokenize")
    assert sent[1] == rendered
    counted = {name: value for name, value in (await gateway.drain()).items() if "text_calls" in name}
    assert counted == {"empo2/text_calls": 1, f"empo2/text_calls/{reason}": 1}


async def test_a_server_that_cannot_render_or_take_ids_costs_nothing_but_the_row(gateway: GatewayUnderTest):
    gateway.model.fault = lambda path, body: 500 if path == "/tokenize" else None
    assert (await play(gateway, REPLIES, CHATS[:2]))[1] == AS_TEXT
    gateway.model.fault = lambda path, body: None
    gateway.model.takes_ids = False
    sent = await play(gateway, REPLIES, CHATS)
    assert sent[1:] == [AS_TEXT, [*AS_TEXT, *ids("look"), END, *ids(turn("a lamp"))]]
    metrics = await gateway.drain()
    assert (metrics["empo2/text_calls/failed"], metrics["empo2/text_calls/ignored"]) == (1, 1)
    assert metrics["empo2/continued_calls"] == 0


def test_vllm_is_started_so_that_it_takes_ids_and_sends_spans(tmp_path: Path):
    settings, ids = load_settings("cpu", ["gateway.cumulative_tokens=false"]), load_settings("cpu", [ON])
    for given, expected in ((ids, [PROMPT_IDS]), (settings, [KEY_CHECK])):
        command = vllm_command(given, MODEL, 1)
        assert [command[place + 1] for place, word in enumerate(command) if word == "--middleware"] == expected
    config = build_verl_config(settings, model_path=MODEL, run_directory=tmp_path, gateway_url="", gateway_key="")
    options = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    before = dict(options)
    name_middleware(config, ids)
    assert options == {**before, "middleware": PROMPT_IDS}
    name_middleware(config, settings)
    assert options == {**before, "middleware": KEY_CHECK}
    take_traces(config, "http://c/v1/traces")
    assert (options.otlp_traces_endpoint, options.enable_prompt_tokens_details) == ("http://c/v1/traces", True)
    assert config.actor_rollout_ref.rollout.disable_log_stats is False
    assert config.ray_kwargs.ray_init.runtime_env.env_vars == VLLM_TRACES
    options.middleware = "my.own"
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm.middleware='my.own': .* take it out"):
        name_middleware(config, settings)


@contextmanager
def vllm_server(model: str, *overrides: str) -> Iterator[str]:
    """vLLM alone, on the machine's GPU or its CPU; its address."""
    own = load_settings("cpu" if device() == "cpu" else "gpu-1", overrides)
    environment = commands.environment_without() | serving._vllm_environment(own)
    with TemporaryDirectory(prefix="vllm-") as logs, running(Path(logs), environment) as processes:
        (endpoint,) = serving._start_vllm(own, model, processes)
        commands.wait_for(f"{endpoint}/models", processes.check)
        names = [process.name() for process in psutil.Process().children(recursive=True)]
        assert any("VLLM::Engine" in name for name in names) and not any("VLLM::Worker" in name for name in names)
        yield endpoint


@dataclass
class Vllm:
    """The real one, in the place of the scripted server."""

    url: str
    reply: Any = None

    @contextmanager
    def serve(self) -> Iterator["Vllm"]:
        yield self


@pytest.mark.stack
@pytest.mark.timeout(590)
async def test_real_vllm_reads_the_sampled_ids_and_parses_calls(
    quiet: None, empty_stores: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Calls that vLLM forces are written as JSON, and rendered in the template's form: each drifts. Then free text.

    vLLM's own spans are children of the gateway's.
    """
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    direction = {"type": "string", "enum": ["north", "south"]}
    schema = {"type": "object", "properties": {"direction": direction}, "required": ["direction"]}
    act = {"type": "function", "function": {"name": "act", "parameters": {**schema, "additionalProperties": False}}}
    expected: list[list[int]] = []
    with OtlpReceiver().serve() as receiver, vllm_server(MODEL, ON, f"gateway.traces={receiver.url}") as url:
        server: Any = Vllm(url)
        async with running_gateway(tmp_path, ON, f"gateway.traces={receiver.url}", model=server) as gateway:
            gateway.client.timeout = httpx.Timeout(300)
            rollout = await gateway.create("no-memory")
            messages: list[Body] = [SYSTEM, user("a room")]
            new = turn("a room")
            for number in range(7):
                choice = {"type": "function", "function": {"name": "act"}} if number < 3 else "none"
                body = {"messages": messages, "tools": [act], "tool_choice": choice}
                body["max_tokens"] = 256 if number < 3 else 64  # it may write white space before it ends a call
                body |= {"return_token_ids": True, "logprobs": True}
                answer = (await gateway.call(rollout, body)).raise_for_status().json()
                reply, sampled = answer["choices"][0]["message"], answer["choices"][0]["token_ids"]
                assert len(answer["choices"][0]["logprobs"]["content"]) == len(sampled) > 0
                calls = reply.get("tool_calls") or []
                assert [call["function"]["name"] for call in calls] == ["act"] * (number < 3)
                if expected:
                    assert answer["prompt_token_ids"] == [*expected[-1], *ids(new)]
                end = [] if sampled[-1] == END else [END]
                expected.append([*answer["prompt_token_ids"], *sampled, *end])
                said = {name: reply[name] for name in ("role", "content", "tool_calls") if reply.get(name)}
                text = f"hall {number}"
                results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
                messages = [*messages, said, *(results or [user(text)])]
                new = turn(f"<tool_response>\n{text}\n</tool_response>" if calls else text)
            metrics = await gateway.drain()
            await until(lambda: sum(span.name in ("chat", "llm_request") for span in receiver.spans) == 14)
    calls = [span for span in receiver.spans if span.name == "chat"]
    served = {span.parent: span.attributes for span in receiver.spans if span.name == "llm_request"}
    assert len(calls) == 7
    for call in calls:
        assert served[call.id]["gen_ai.usage.prompt_tokens"] == call.attributes["gen_ai.usage.input_tokens"]
    # A prompt continues the one before it, of which vLLM has whole blocks of 16 tokens or more in its cache.
    assert max(call.attributes.get("gen_ai.usage.cache_read.input_tokens", 0) for call in calls) > 0
    assert metrics["empo2/text_calls"] == 0
    assert metrics["empo2/continued_calls"] == 6
    assert metrics["empo2/token_drift"] >= 3 / 6
